"""The JSON of Anthropic's messages, whole and as events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.anthropic.content import Content, Event
from gateway.anthropic.dialect import error_document
from gateway.errors import ApiError
from gateway.generation import Usage
from gateway.openai.answer import AnswerIdentity, WholeChoice
from gateway.text_delta import TextDelta

_encode = msgspec.json.Encoder().encode


class MessageFormat:
    """Implements AnswerFormat, for answers of one choice.

    A stream opens with the usage of its prompt, so `opening_events` comes before the first `events`.
    """

    def __init__(self, identity: AnswerIdentity, *, shows_thinking: bool = True) -> None:
        self._identity = identity
        self._content = Content(shows_thinking=shows_thinking)
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None

    def opening_events(self, usage: Usage) -> bytes:
        message = {**self._head(), "content": [], **_end_fields(None, None)}
        return _written([{"type": "message_start", "message": {**message, "usage": _usage_fields(usage)}}])

    def events(self, deltas: Sequence[TextDelta]) -> bytes:
        return _written(event for delta in deltas for event in self._add(delta))

    def closing_events(self, usage: Usage) -> bytes:
        end = _end_fields(self._stop_reason, self._stop_sequence)
        return _written(
            [
                {"type": "message_delta", "delta": end, "usage": _usage_fields(usage)},
                {"type": "message_stop"},
            ]
        )

    def failure_events(self, error: ApiError) -> bytes:
        return _written([error_document(error)])

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        """What was handed to `take`: a choice does not know in which order its parts came."""
        return {
            **self._head(),
            "content": self._content.blocks,
            **_end_fields(self._stop_reason, self._stop_sequence),
            "usage": _usage_fields(usage),
        }

    def take(self, deltas: Sequence[TextDelta]) -> None:
        """As `events`, for an answer that is told as a whole."""
        for delta in deltas:
            for _ in self._add(delta):
                pass

    def _add(self, delta: TextDelta) -> Iterable[Event]:
        self._finish_reason = delta.finish_reason or self._finish_reason
        if isinstance(delta.stop_reason, str):
            self._stop_sequence = delta.stop_reason
        return self._content.add(delta)

    @property
    def _stop_reason(self) -> str:
        if self._finish_reason == "length":
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._content.calls_tools else "end_turn"

    def _head(self) -> dict[str, Any]:
        identity = self._identity
        return {"id": identity.answer_id, "type": "message", "role": "assistant", "model": identity.model}


def _end_fields(stop_reason: str | None, stop_sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "stop_details": None}


def _usage_fields(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what came from the cache apart from the other tokens of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,  # of what was marked for it: here whatever can be is cached
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _written(events: Iterable[Event]) -> bytes:
    """Clients go by the names of events. JSON has no raw line breaks, so no text looks like framing."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event)) for event in events)
