"""The JSON of plain completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.errors import ApiError
from gateway.generation import Usage
from gateway.openai.answer import AnswerIdentity, WholeChoice, usage_fields
from gateway.openai.event_stream import DONE, event
from gateway.openai.logprobs import completion_logprobs
from gateway.text_delta import TextDelta


class CompletionFormat:
    """Implements AnswerFormat."""

    def __init__(
        self, identity: AnswerIdentity, *, includes_usage: bool = False, tells_token_ids: bool = False
    ) -> None:
        self._head = {
            "id": identity.answer_id,
            "object": "text_completion",  # of chunks, too
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.fingerprint or None,
        }
        self._includes_usage = includes_usage
        self._tells_token_ids = tells_token_ids
        self._begun: set[int] = set()  # indices of choices that had a delta

    def events(self, deltas: Sequence[TextDelta]) -> bytes:
        null_usage = {"usage": None} if self._includes_usage else {}
        events = b""
        for delta in deltas:
            is_first = delta.index not in self._begun
            self._begun.add(delta.index)
            if delta.says_something or delta.finish_reason or is_first:
                choice = self._choice(delta.index, delta)
                events += event({**self._head, "choices": [choice], **null_usage})
        return events

    def closing_events(self, usage: Usage) -> bytes:
        if not self._includes_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage_fields(usage)}) + DONE

    def failure_events(self, error: ApiError) -> bytes:
        return event(error.body)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        documents = [
            self._choice(index, choice) | choice.prompt_fields for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": documents, "usage": usage_fields(usage)}

    def _choice(self, index: int, said: TextDelta | WholeChoice) -> dict[str, Any]:
        document: dict[str, Any] = {
            "index": index,
            "text": said.text,
            "logprobs": completion_logprobs(said.logprobs),
            "finish_reason": said.finish_reason,
            "stop_reason": said.stop_reason,  # vLLM's
        }
        if self._tells_token_ids:
            document["token_ids"] = said.token_ids
            if said.prompt_token_ids is not None:
                document["prompt_token_ids"] = said.prompt_token_ids
        return document
