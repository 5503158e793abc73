"""The content of an answer, block by block, while it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic_core

from gateway.text_delta import TextDelta, ToolCallDelta

Event = dict[str, Any]


class Content:
    """Each `add` yields the events that a stream has for what was added; `blocks` is what all of them add up
    to, which is the content of an answer as a whole. One block is open at a time."""

    def __init__(self, *, shows_thinking: bool) -> None:
        """False: that the model thought is told, but not what."""
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._pieces: list[str] = []  # of the open block
        self._is_open = False

    @property
    def calls_tools(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, delta: TextDelta) -> Iterator[Event]:
        if delta.reasoning:
            if not self._is_within("thinking"):
                yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
            if self._shows_thinking:
                yield self._more({"type": "thinking_delta", "thinking": delta.reasoning}, delta.reasoning)
        if delta.text:
            if not self._is_within("text"):
                yield from self._open({"type": "text", "text": ""})
            yield self._more({"type": "text_delta", "text": delta.text}, delta.text)
        for call in delta.tool_calls:
            yield from self._add_call(call)
        if delta.finish_reason is not None:
            yield from self._close()

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.call_id is not None:
            yield from self._open({"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
        if call.arguments:
            assert self._is_within("tool_use"), "the arguments of a call come in one piece of the answer"
            yield self._more({"type": "input_json_delta", "partial_json": call.arguments}, call.arguments)

    def _is_within(self, kind: str) -> bool:
        return self._is_open and self.blocks[-1]["type"] == kind

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self.blocks.append(block)
        self._pieces = []
        self._is_open = True
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _more(self, delta: dict[str, Any], piece: str) -> Event:
        self._pieces.append(piece)
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        block, said = self.blocks[-1], "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = _object(said)
        else:
            block[block["type"]] = said
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1


def _object(arguments: str) -> dict[str, Any]:
    """What there is of an object: a call that the token limit has cut may end anywhere. The clients of
    streams read the pieces in the same way."""
    try:
        value = pydantic_core.from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
