"""The JSON of a response, whole and as typed events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gateway.errors import ApiError
from gateway.generation import Usage
from gateway.openai.answer import AnswerIdentity, WholeChoice
from gateway.openai.responses.body import FunctionChoice, ResponsesBody
from gateway.openai.responses.output import Event, ResponseOutput
from gateway.openai.responses.translation import FIELDS
from gateway.text_delta import TextDelta

_encode = msgspec.json.Encoder().encode


class ResponseFormat:
    """Implements AnswerFormat. It holds the response itself, since the last event tells all of it."""

    def __init__(self, body: ResponsesBody, identity: AnswerIdentity, num_input_items: int) -> None:
        self._body = body
        self._identity = identity
        self._output = ResponseOutput(identity.answer_id, num_input_items)
        self._finish_reason: str | None = None
        self._num_events = 0
        self._before_text = b""  # of an event that brings nothing but text, see events
        self.is_stored = body.store

    def events(self, deltas: Sequence[TextDelta]) -> bytes:
        events = b"".join(map(self._write, self._opening()))
        for delta in deltas:
            is_more_than_text = delta.finish_reason or delta.logprobs or delta.tool_calls or delta.reasoning
            if delta.text and not is_more_than_text and self._output.is_saying:
                events += self._write_text(delta.text)
            else:
                events += b"".join(map(self._write, self._take(delta)))
                self._before_text = b""
        return events

    def take(self, deltas: Sequence[TextDelta]) -> None:
        """As `events`, for an answer that is told as a whole."""
        for delta in deltas:
            for _ in self._take(delta):
                pass

    def closing_events(self, usage: Usage) -> bytes:
        response = self.response(usage)
        return self._write({"type": f"response.{response['status']}", "response": response})

    def failure_events(self, error: ApiError) -> bytes:
        error = FIELDS.renamed(error)
        self._output.break_off()
        events = b"".join(map(self._write, self._opening()))
        fault = {"code": error.code or error.kind, "message": error.message, "param": error.param}
        events += self._write({"type": "error", **fault})
        return events + self._write({"type": "response.failed", "response": self.failed(error)})

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        """`choices` are left unread: they do not tell in which order the parts came, as `take` was told."""
        return self.response(usage)

    def queued(self) -> dict[str, Any]:
        """Before anything has come, for who is to ask again."""
        return self._response("queued")

    def failed(self, error: ApiError) -> dict[str, Any]:
        error = FIELDS.renamed(error)
        self._output.break_off()
        return {
            **self._response("failed"),
            "error": {"code": _code_of_failure(error), "message": error.message},
        }

    def response(self, usage: Usage) -> dict[str, Any]:
        """Once it has ended."""
        is_cut = self._finish_reason != "stop"
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._output.num_reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _take(self, delta: TextDelta) -> Iterator[Event]:
        self._finish_reason = delta.finish_reason or self._finish_reason
        return self._output.add(delta)

    def _opening(self) -> Iterator[Event]:
        if self._num_events == 0:
            response = self._response("in_progress")
            yield {"type": "response.created", "response": response}
            yield {"type": "response.in_progress", "response": response}

    def _write(self, event: Event) -> bytes:
        number = self._num_events
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (
            event["type"].encode(),
            _encode({"type": event["type"], "sequence_number": number, **event}),
        )

    def _write_text(self, text: str) -> bytes:
        """As `_write`, of the event that most are: all but the text and the number is written once."""
        self._output.say(text)
        if not self._before_text:
            place = _encode({**self._output.place, "content_index": 0, "logprobs": []})[1:-1]
            self._before_text = (
                b"event: response.output_text.delta\n"
                b'data: {"type":"response.output_text.delta",%b,"delta":' % place
            )
        number = self._num_events
        self._num_events += 1
        return b'%b%b,"sequence_number":%d}\n\n' % (self._before_text, _encode(text), number)

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        choice = body.tool_choice
        return {
            "id": self._identity.answer_id,
            "object": "response",
            "created_at": self._identity.created,
            "status": status,
            "background": body.background,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self._identity.model,
            "output": self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": body.form_of_text, "verbosity": "medium"},
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            "tools": [tool.told for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


def _code_of_failure(error: ApiError) -> str:
    """One of the few that this object may have; the event before it has our own."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"
