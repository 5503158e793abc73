"""Calls as Mistral's models write them: [TOOL_CALLS]f[ARGS]{...}, or [TOOL_CALLS] [{"name": "f", ...}]."""

from __future__ import annotations

import re

from gateway.openai.tools.call_object import CallObject
from gateway.openai.tools.incremental_parser import CallEnd, IncrementalParser
from gateway.openai.tools.json_scanner import JsonScanner
from gateway.openai.tools.text_cursor import Reading

TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"

_WORD = re.compile(r"[^\s\[{]*")  # a name or an id


class MistralParser(IncrementalParser):
    """A marker may stand anywhere, and before each call; the ids that models write are left out.

    What looks like a call and is none is text, and so is the rest of its array; further markers may follow.
    Behind a call that broke within its arguments all is text.
    """

    def _read(self) -> Reading[None]:
        while (yield from self._read_text_until(TOOL_CALLS)):
            end = yield from self._read_calls()
            if end is CallEnd.BROKEN:
                yield from self._tell_rest_of_call()
                yield from self._read_text_to_end()
            elif end is CallEnd.COMPLETE:
                yield from self._tell_rest_of_call()
            else:
                self._tell_text()

    def _read_calls(self) -> Reading[CallEnd]:
        """What comes behind one marker."""
        cursor = self._cursor
        cursor.pass_over(len(TOOL_CALLS))
        yield from cursor.pass_space()
        if (yield from cursor.stands_before(TOOL_CALLS)):
            return CallEnd.NO_CALL
        if (yield from cursor.pass_if("[")):
            return (yield from self._read_array())
        if (yield from cursor.stands_before("{")):
            return (yield from CallObject(cursor, self._parts, self._names).read())
        return (yield from self._read_named_call())

    def _read_array(self) -> Reading[CallEnd]:
        cursor = self._cursor
        outcome = CallEnd.NO_CALL  # of the whole
        yield from cursor.pass_space()
        while (yield from cursor.stands_before("{")):
            end = yield from CallObject(cursor, self._parts, self._names).read()
            if end is CallEnd.NO_CALL:
                self._tell_text()
                yield from cursor.pass_json(lambda _: self._tell_text(), JsonScanner(within="["))
            if end is not CallEnd.COMPLETE:
                return end
            outcome = end
            yield from cursor.pass_space()
            if (yield from cursor.pass_if("]")):
                cursor.settle()
                break
            if not (yield from cursor.pass_if(",")):
                break
            yield from cursor.pass_space()
        return outcome

    def _read_named_call(self) -> Reading[CallEnd]:
        cursor = self._cursor
        name = yield from cursor.pass_run(_WORD)
        yield from cursor.pass_space()
        if (yield from cursor.pass_if(CALL_ID)):
            yield from cursor.pass_space()
            yield from cursor.pass_run(_WORD)
            yield from cursor.pass_space()
        if (yield from cursor.pass_if(ARGUMENTS)):
            yield from cursor.pass_space()
        if not (yield from cursor.stands_before("{")):
            return CallEnd.NO_CALL
        if name not in self._names:
            yield from cursor.pass_json(lambda _: self._tell_text())
            return CallEnd.NO_CALL
        cursor.settle()
        self._parts.begin_call(name)
        is_complete = yield from cursor.pass_json(self._tell_arguments)
        return CallEnd.COMPLETE if is_complete else CallEnd.BROKEN

    def _tell_arguments(self, _: str) -> None:
        self._parts.add_arguments(self._cursor.settle())
