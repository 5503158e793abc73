"""Calls as Hermes and Qwen write them: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from __future__ import annotations

from gateway.openai.tools.call_object import CallObject
from gateway.openai.tools.incremental_parser import CallEnd, IncrementalParser
from gateway.openai.tools.text_cursor import Reading

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


class HermesParser(IncrementalParser):
    """A call may stand anywhere; the closing marker may be missing.

    What looks like a call and is none is text, and others may follow it. Behind a call that broke within its
    arguments all is text, since nobody can tell any more what was meant to stand within a string.
    """

    def _read(self) -> Reading[None]:
        while (yield from self._read_text_until(OPENING)):
            end = yield from self._read_call()
            if end is CallEnd.BROKEN:
                yield from self._tell_rest_of_call()
                yield from self._read_text_to_end()
            elif end is CallEnd.NO_CALL:
                self._tell_text()

    def _read_call(self) -> Reading[CallEnd]:
        cursor = self._cursor
        cursor.pass_over(len(OPENING))
        yield from cursor.pass_space()
        end = yield from CallObject(cursor, self._parts, self._names).read()
        if end is CallEnd.COMPLETE:
            yield from self._tell_rest_of_call()
            yield from cursor.pass_space()
            if (yield from cursor.pass_if(CLOSING)):
                cursor.settle()
            else:
                yield from self._tell_rest_of_call()
        return end
