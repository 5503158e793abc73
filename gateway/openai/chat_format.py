"""The JSON of chat completions, whole and in chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.errors import ApiError
from gateway.generation import Usage
from gateway.openai.answer import AnswerIdentity, ToolCall, WholeChoice, usage_fields
from gateway.openai.event_stream import DONE, event
from gateway.openai.logprobs import chat_logprobs
from gateway.text_delta import TextDelta, ToolCallDelta

_encode = msgspec.json.Encoder().encode


class ChatFormat:
    """Implements AnswerFormat."""

    def __init__(
        self,
        identity: AnswerIdentity,
        *,
        includes_usage: bool = False,
        tells_token_ids: bool = False,
        names_tool: bool = False,
    ) -> None:
        """`names_tool`: the client has said which tool is to be called, so that this is no choice of the
        model's, nor a reason to end (OpenAI's reading)."""
        self._identity = identity
        self._reason_of_calls = "stop" if names_tool else "tool_calls"
        self._includes_usage = includes_usage
        self._tells_token_ids = tells_token_ids
        self._begun: set[int] = set()  # indices of choices that had a delta
        self._calling: set[int] = set()  # of those that have called a tool
        self._behind_choice = b'],"usage":null}\n\n' if includes_usage else b"]}\n\n"

    def events(self, deltas: Sequence[TextDelta]) -> bytes:
        return b"".join(map(self._events, deltas))

    def closing_events(self, usage: Usage) -> bytes:
        if not self._includes_usage:
            return DONE
        document = {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_fields(usage)}
        return event(document) + DONE

    def failure_events(self, error: ApiError) -> bytes:
        return event(error.body)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        documents = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": chat_logprobs(choice.logprobs),
                "finish_reason": self._finish_reason(choice.finish_reason, calls=bool(choice.tool_calls)),
                "stop_reason": choice.stop_reason,  # vLLM's
                **({"token_ids": choice.token_ids} if self._tells_token_ids else {}),
            }
            for index, choice in enumerate(choices)
        ]
        return {
            **self._head("chat.completion"),
            "choices": documents,
            "usage": usage_fields(usage),
            **choices[0].prompt_fields,
            **({"prompt_token_ids": choices[0].prompt_token_ids} if self._tells_token_ids else {}),
        }

    def _events(self, delta: TextDelta) -> bytes:
        is_first = delta.index not in self._begun
        is_more_than_text = delta.finish_reason or delta.logprobs or delta.tool_calls or delta.reasoning
        if delta.text and not (is_first or is_more_than_text or self._tells_token_ids):
            return self._event(delta.index, b'{"content":%b}' % _encode(delta.text))
        self._begun.add(delta.index)
        if delta.tool_calls:
            self._calling.add(delta.index)
        events = b""
        token_ids = delta.token_ids if self._tells_token_ids else []
        if delta.says_something or is_first or token_ids:
            events = self._event(
                delta.index,
                _encode(_delta_fields(delta, is_first)),
                logprobs=chat_logprobs(delta.logprobs),
                token_ids=token_ids,
            )
            if delta.prompt_token_ids is not None:  # beside the choices of the first chunk, as vLLM has it
                events = events[:-3] + b',"prompt_token_ids":%b}\n\n' % _encode(delta.prompt_token_ids)
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta.finish_reason, calls=delta.index in self._calling)
            stop_reason = b',"stop_reason":' + _encode(delta.stop_reason)  # vLLM's
            events += self._event(delta.index, b"{}", finish_reason=reason, more=stop_reason)
        return events

    @functools.cached_property
    def _before_choice(self) -> bytes:
        """Most chunks of a stream are a piece of text and nothing else: all but that text is written once."""
        return b"data: " + _encode(self._head("chat.completion.chunk"))[:-1] + b',"choices":['

    def _event(
        self,
        index: int,
        delta: bytes,
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        token_ids: Sequence[int] = (),
        more: bytes = b"",
    ) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b%b}' % (
            index,
            delta,
            b"null" if logprobs is None else _encode(logprobs),
            b"null" if finish_reason is None else _encode(finish_reason),
            b',"token_ids":%b' % _encode(token_ids) if token_ids else b"",
            more,
        )
        return b"".join((self._before_choice, choice, self._behind_choice))

    def _finish_reason(self, reason: str | None, *, calls: bool) -> str | None:
        """A turn that ends by itself and calls tools waits for their results."""
        return self._reason_of_calls if calls and reason == "stop" else reason

    def _head(self, kind: str) -> dict[str, Any]:
        identity = self._identity
        return {
            "id": identity.answer_id,
            "object": kind,
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.fingerprint or None,
        }


def _delta_fields(delta: TextDelta, is_first: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
    if delta.text or delta.logprobs:
        fields["content"] = delta.text
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        fields["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return fields


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.call_id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _message(choice: WholeChoice) -> dict[str, Any]:
    content = choice.text if choice.text or not choice.tool_calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_call(call) for call in choice.tool_calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
