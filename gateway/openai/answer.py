"""The JSON of an answer, whole or in chunks, for chat and for plain completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.generation import TextDelta, Usage
from gateway.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.scored_token import RankedToken, ScoredToken


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What every part of one answer repeats."""

    answer_id: str
    model: str  # the name that the client asked for
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class WholeChoice:
    """What the deltas of one choice add up to."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[ScoredToken] = field(default_factory=list)
    num_tokens: int = 0
    logprob_sum: float = 0.0
    prompt_logprobs: list[list[RankedToken]] | None = None  # None: not asked for

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.logprobs += delta.logprobs
        self.num_tokens += delta.num_tokens
        self.logprob_sum += delta.logprob_sum
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def logprob_per_token(self) -> float:
        """0 of a choice without tokens."""
        return self.logprob_sum / max(self.num_tokens, 1)

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """What there is to tell of the prompt, in vLLM's form."""
        if self.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.prompt_logprobs)}


class AnswerFormat(Protocol):
    """The JSON of an answer, whole or in chunks."""

    def chunk(
        self, identity: AnswerIdentity, delta: TextDelta, *, is_first: bool
    ) -> list[dict[str, Any]]: ...

    def usage_chunk(self, identity: AnswerIdentity, usage: Usage) -> dict[str, Any]: ...

    def whole(
        self, identity: AnswerIdentity, choices: Sequence[WholeChoice], usage: Usage
    ) -> dict[str, Any]: ...


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChatFormat:
    CHUNK = "chat.completion.chunk"

    def chunk(self, identity: AnswerIdentity, delta: TextDelta, *, is_first: bool) -> list[dict[str, Any]]:
        fields: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if delta.text or delta.logprobs or is_first:
            fields["content"] = delta.text
        choices = [self._choice(delta.index, fields, None, delta.logprobs)] if fields else []
        if delta.finish_reason is not None:
            choices.append(self._choice(delta.index, {}, delta.finish_reason))
        return [{**_head(identity, self.CHUNK), "choices": [choice]} for choice in choices]

    def usage_chunk(self, identity: AnswerIdentity, usage: Usage) -> dict[str, Any]:
        return _usage_chunk(identity, self.CHUNK, usage)

    def whole(self, identity: AnswerIdentity, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        documents = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {
            **_head(identity, "chat.completion"),
            "choices": documents,
            "usage": usage_fields(usage),
            **choices[0].prompt_fields,
        }

    def _choice(
        self,
        index: int,
        fields: dict[str, Any],
        finish_reason: str | None,
        logprobs: Sequence[ScoredToken] = (),
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": fields,
            "logprobs": chat_logprobs(logprobs),
            "finish_reason": finish_reason,
        }


class CompletionFormat:
    OBJECT = "text_completion"  # of chunks, too

    def chunk(self, identity: AnswerIdentity, delta: TextDelta, *, is_first: bool) -> list[dict[str, Any]]:
        if not (delta.text or delta.logprobs or delta.finish_reason or is_first):
            return []
        choice = self._choice(delta.index, delta.text, delta.finish_reason, delta.logprobs)
        return [{**_head(identity, self.OBJECT), "choices": [choice]}]

    def usage_chunk(self, identity: AnswerIdentity, usage: Usage) -> dict[str, Any]:
        return _usage_chunk(identity, self.OBJECT, usage)

    def whole(self, identity: AnswerIdentity, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        documents = [
            self._choice(index, choice.text, choice.finish_reason, choice.logprobs) | choice.prompt_fields
            for index, choice in enumerate(choices)
        ]
        return {**_head(identity, self.OBJECT), "choices": documents, "usage": usage_fields(usage)}

    def _choice(
        self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[ScoredToken]
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(logprobs),
            "finish_reason": finish_reason,
        }


def _usage_chunk(identity: AnswerIdentity, kind: str, usage: Usage) -> dict[str, Any]:
    return {**_head(identity, kind), "choices": [], "usage": usage_fields(usage)}


def _head(identity: AnswerIdentity, kind: str) -> dict[str, Any]:
    return {
        "id": identity.answer_id,
        "object": kind,
        "created": identity.created,
        "model": identity.model,
    }
