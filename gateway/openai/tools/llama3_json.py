"""Calls as Llama 3 writes them: a message that is {"name": "f", "parameters": {...}}, or several of these."""

from __future__ import annotations

import re

from gateway.openai.tools.call_object import CALL_KEYS, CallObject
from gateway.openai.tools.incremental_parser import CallEnd, IncrementalParser
from gateway.openai.tools.text_cursor import Reading

PYTHON_TAG = "<|python_tag|>"

_SEPARATORS = re.compile(r"[ \t\n\r;,]*")


class Llama3JsonParser(IncrementalParser):
    """Only a message that begins with a call has calls. They are separated by `;`, commas or white space,
    or are the elements of an array.

    From the first thing on that is no call of a known tool all is text. A JSON object whose first key is none
    of a call's is told as text at once; one that might be a call waits for its name.
    """

    def _read(self) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.pass_space()
        if (yield from cursor.pass_if(PYTHON_TAG)):
            yield from cursor.pass_space()
        yield from self._read_calls(is_array=(yield from cursor.pass_if("[")))
        if self._parts.has_calls:
            yield from self._tell_rest_of_call()
        yield from self._read_text_to_end()

    def _read_calls(self, *, is_array: bool) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.pass_space()
        while (yield from cursor.next_character()) == "{":
            end = yield from CallObject(cursor, self._parts, self._names, CALL_KEYS).read()
            if end is CallEnd.NO_CALL:
                self._tell_text()
            if end is not CallEnd.COMPLETE:
                return
            yield from cursor.pass_run(_SEPARATORS)
            if is_array and (yield from cursor.pass_if("]")):
                cursor.settle()
                return
