"""The parts of an answer, and what every form of it has to offer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.errors import ApiError
from gateway.generation import Usage
from gateway.openai.logprobs import prompt_logprobs
from gateway.scored_token import RankedToken, ScoredToken
from gateway.text_delta import TextDelta


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What every part of one answer repeats."""

    answer_id: str
    model: str  # the name that the client asked for
    fingerprint: str = ""  # of the engine, see EngineLink
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class ToolCall:
    """A call as a whole. `arguments` is the JSON text as the model wrote it."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeChoice:
    """What the deltas of one choice add up to."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[ScoredToken] = field(default_factory=list)
    num_tokens: int = 0
    logprob_sum: float = 0.0
    prompt_logprobs: list[list[RankedToken]] | None = None  # None: not asked for
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None  # None: not asked for
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.call_id is not None and call.name is not None:
                self.tool_calls.append(ToolCall(call.call_id, call.name))
            self.tool_calls[call.index].arguments += call.arguments
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.logprobs += delta.logprobs
        self.num_tokens += delta.num_tokens
        self.logprob_sum += delta.logprob_sum
        self.token_ids += delta.token_ids
        if delta.stop_reason is not None:
            self.stop_reason = delta.stop_reason
        if delta.prompt_token_ids is not None:
            self.prompt_token_ids = delta.prompt_token_ids
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
    """One answer as a client gets it, whole or as server-sent events. An object for each answer."""

    def events(self, deltas: Sequence[TextDelta]) -> bytes:
        """What these deltas add to the stream; the first call opens it. May be empty."""

    def closing_events(self, usage: Usage) -> bytes:
        """The end of a stream whose choices are complete."""

    def failure_events(self, error: ApiError) -> bytes:
        """The end of a stream that breaks off: it must not look like a complete one."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]: ...


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
