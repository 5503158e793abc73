"""Calls as Llama 3.2, Llama 4 and ToolACE write them: [f(a=1, b="x"), g()]."""

from __future__ import annotations

import re

from gateway.openai.tools.incremental_parser import CallEnd, IncrementalParser
from gateway.openai.tools.python_literal import PythonLiteral
from gateway.openai.tools.text_cursor import Reading

PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
PYTHON_TAG = "<|python_tag|>"

_NAME = re.compile(r"""[^\s()\[\]{}"'=,]*""")
_KEYWORD = re.compile(r"[\w-]*")


class PythonicParser(IncrementalParser):
    """Only a message that begins with `[`, the name of a tool and `(` has calls. Arguments need keywords.

    They are told as JSON text. From the first thing on that is no call of a known tool all is text.
    """

    def _read(self) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.pass_space()
        if (yield from cursor.pass_if(PYTHON_START)):
            yield from cursor.pass_space()
        if (yield from cursor.pass_if("[")):
            yield from self._read_calls()
        if self._parts.has_calls:
            yield from self._tell_rest_of_call()
        yield from self._read_text_to_end()

    def _read_calls(self) -> Reading[None]:
        """Behind the opening bracket."""
        cursor = self._cursor
        while True:
            end = yield from self._read_call()
            if end is CallEnd.NO_CALL:
                self._tell_text()
            if end is not CallEnd.COMPLETE:
                return
            yield from cursor.pass_space()
            if (yield from cursor.pass_if(",")):
                yield from cursor.pass_space()
            elif not (yield from cursor.stands_before("]")):
                return
            if (yield from cursor.pass_if("]")):
                cursor.settle()
                yield from self._pass_end_marker()
                return

    def _pass_end_marker(self) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.pass_space()
        if (yield from cursor.pass_if(PYTHON_END)) or (yield from cursor.pass_if(PYTHON_TAG)):
            cursor.settle()

    def _read_call(self) -> Reading[CallEnd]:
        cursor = self._cursor
        yield from cursor.pass_space()
        name = yield from cursor.pass_run(_NAME)
        if name not in self._names:
            return CallEnd.NO_CALL
        yield from cursor.pass_space()
        if not (yield from cursor.pass_if("(")):
            return CallEnd.NO_CALL
        yield from cursor.pass_space()
        if (yield from cursor.pass_if(")")):
            self._begin(name, "{}")
            return CallEnd.COMPLETE
        keyword = yield from self._read_keyword()
        if keyword is None:
            return CallEnd.NO_CALL
        self._begin(name, f'{{"{keyword}": ')
        while True:
            if not (yield from PythonLiteral(cursor, self._parts.add_arguments).read()):
                return CallEnd.BROKEN
            yield from cursor.pass_space()
            has_comma = yield from cursor.pass_if(",")
            yield from cursor.pass_space()
            if (yield from cursor.pass_if(")")):
                self._tell_json("}")
                return CallEnd.COMPLETE
            keyword = (yield from self._read_keyword()) if has_comma else None
            if keyword is None:
                return CallEnd.BROKEN
            self._tell_json(f', "{keyword}": ')

    def _read_keyword(self) -> Reading[str | None]:
        """Passes it and the equals sign; None: that is not what comes."""
        cursor = self._cursor
        keyword = yield from cursor.pass_run(_KEYWORD)
        yield from cursor.pass_space()
        return keyword if keyword and (yield from cursor.pass_if("=")) else None

    def _begin(self, name: str, json_text: str) -> None:
        self._parts.begin_call(name)
        self._tell_json(json_text)

    def _tell_json(self, text: str) -> None:
        self._cursor.settle()
        self._parts.add_arguments(text)
