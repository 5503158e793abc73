"""The items of one response while they come into being, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.openai.logprobs import chat_logprobs
from gateway.openai.responses.identity import item_id
from gateway.openai.responses.items import PREFIXES, Item
from gateway.scored_token import ScoredToken
from gateway.text_delta import TextDelta, ToolCallDelta

Event = dict[str, Any]  # without its number


class ResponseOutput:
    """Each item is open from its first piece to the first piece of the next one, or to the end."""

    def __init__(self, response_id: str, num_input_items: int) -> None:
        self._response_id = response_id
        self._num_input_items = num_input_items
        self.items: list[Item] = []
        self.num_reasoning_tokens = 0
        self._has_open_item = False
        self._call_index = -1  # of the open item among the calls, if it is one
        self._num_unplaced_tokens = 0  # of what was held back: nobody knows yet whether it is thought or said
        self._unplaced_logprobs: list[ScoredToken] = []

    @property
    def is_saying(self) -> bool:
        """Whether a piece of text would only be more of the open item."""
        return self._has_open_item and self.items[-1]["type"] == "message" and not self._unplaced_logprobs

    def say(self, text: str) -> None:
        """More of the open message: `add` of a delta that has nothing but text, without its event."""
        self._num_unplaced_tokens = 0
        self.items[-1]["content"][0]["text"] += text

    @property
    def place(self) -> dict[str, Any]:
        """Where in the response the open item is."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def add(self, delta: TextDelta) -> Iterator[Event]:
        self._num_unplaced_tokens += delta.num_tokens
        self._unplaced_logprobs += delta.logprobs
        if delta.reasoning:
            yield from self._think(delta.reasoning)
        if delta.text:
            yield from self._say(delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)
        if delta.finish_reason is not None:
            yield from self._end(is_cut=delta.finish_reason != "stop")

    def break_off(self) -> None:
        """For an answer that fails: what there is of it stays as it is."""
        if self._has_open_item:
            self.items[-1]["status"] = "incomplete"
            self._has_open_item = False

    def _think(self, text: str) -> Iterator[Event]:
        if not self._is_open("reasoning"):
            yield from self._open({"type": "reasoning", "summary": [], "content": []})
            yield from self._open_part({"type": "reasoning_text", "text": ""})
        self.num_reasoning_tokens += self._num_unplaced_tokens
        self._num_unplaced_tokens = 0
        self._unplaced_logprobs.clear()
        self._part["text"] += text
        yield {"type": "response.reasoning_text.delta", **self._place_of_part, "delta": text}

    def _say(self, text: str) -> Iterator[Event]:
        if not self._is_open("message"):
            yield from self._open({"type": "message", "role": "assistant", "content": []})
            yield from self._open_part({"type": "output_text", "annotations": [], "logprobs": [], "text": ""})
        self._num_unplaced_tokens = 0
        logprobs = self._take_logprobs()
        self._part["text"] += text
        self._part["logprobs"] += logprobs
        yield {
            "type": "response.output_text.delta",
            **self._place_of_part,
            "delta": text,
            "logprobs": logprobs,
        }

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        self._num_unplaced_tokens = 0
        self._unplaced_logprobs.clear()
        if call.index != self._call_index or not self._is_open("function_call"):
            assert call.call_id is not None, "calls come one after the other, each with its id at first"
            named = {"call_id": call.call_id, "name": call.name, "arguments": ""}
            yield from self._open({"type": "function_call", **named})
            self._call_index = call.index
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            yield {
                "type": "response.function_call_arguments.delta",
                **self.place,
                "delta": call.arguments,
            }

    def _end(self, *, is_cut: bool) -> Iterator[Event]:
        if self._unplaced_logprobs and (self._is_open("message") or not self.items):
            yield from self._say("")  # of the token that ended it
        if not self.items:
            yield from self._say("")  # an answer that is empty is one all the same
        yield from self._close("incomplete" if is_cut else "completed")

    def _is_open(self, kind: str) -> bool:
        return self._has_open_item and self.items[-1]["type"] == kind

    def _open(self, fields: Item) -> Iterator[Event]:
        yield from self._close("completed")
        number = self._num_input_items + len(self.items)
        kind = fields["type"]
        its_id = item_id(PREFIXES[kind], self._response_id, number)
        self.items.append({"id": its_id, "type": kind, "status": "in_progress", **fields})
        self._has_open_item = True
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": _copy(self.items[-1]),
        }

    def _open_part(self, part: dict[str, Any]) -> Iterator[Event]:
        self.items[-1]["content"].append(part)
        yield {"type": "response.content_part.added", **self._place_of_part, "part": {**part}}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._has_open_item:
            return
        self._has_open_item = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **self.place, **arguments}
        else:
            yield {**self._text_done(item["type"]), **self._place_of_part}
            yield {"type": "response.content_part.done", **self._place_of_part, "part": self._part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _text_done(self, kind: str) -> Event:
        text = self._part["text"]
        if kind == "reasoning":
            return {"type": "response.reasoning_text.done", "text": text}
        return {"type": "response.output_text.done", "text": text, "logprobs": self._part["logprobs"]}

    def _take_logprobs(self) -> list[dict[str, Any]]:
        told = chat_logprobs(self._unplaced_logprobs)
        self._unplaced_logprobs = []
        return told["content"] if told is not None else []

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    @property
    def _place_of_part(self) -> dict[str, Any]:
        return {**self.place, "content_index": 0}


def _copy(item: Item) -> Item:
    """As it is now: the item itself goes on to change."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
