"""A call that is written as a JSON object: {"name": "f", "arguments": {...}}."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from gateway.openai.tools.incremental_parser import CallEnd
from gateway.openai.tools.json_scanner import WHITE_SPACE, JsonScanner, is_json_object
from gateway.openai.tools.part_collector import PartCollector
from gateway.openai.tools.text_cursor import Reading, TextCursor

CALL_KEYS = frozenset(("name", "arguments", "parameters", "type", "function"))

_ARGUMENTS_KEYS = ("arguments", "parameters")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class CallObject:
    """Reads one such object, keys in any order, and tells the call as soon as that is certain.

    `parameters` is as good as `arguments`, and both may be a string that holds the JSON text. Where there are
    none, or where they are null or a blank string, they are {}. `{"function": "f", ...}` and `{"function":
    {"name": "f", ...}}` are accepted, and other keys passed over; of a key that comes twice the first counts.
    """

    def __init__(
        self,
        cursor: TextCursor,
        parts: PartCollector,
        names: Collection[str],
        first_keys: Collection[str] | None = None,
    ) -> None:
        """`first_keys`: one of these comes first, or the object is no call and not read on; None: any may."""
        self._cursor = cursor
        self._parts = parts
        self._names = names
        self._first_keys = first_keys
        self._name: str | None = None
        self._held_arguments: str | None = None  # which came before the name
        self._has_begun = False
        self._has_arguments = False  # all of them were told
        self._is_no_call = False  # what is left of the object is passed over as text

    def read(self) -> Reading[CallEnd]:
        """The cursor stands before the brace, and then behind the object or where it broke.

        Of what is no call all that was passed has been told as text.
        """
        is_sound = yield from self._read_object(is_outermost=True)
        if is_sound and not self._has_begun and self._name is not None and not self._is_no_call:
            self._begin()
            self._tell_arguments("{}")
        if not self._has_begun:
            self._tell_text()
            return CallEnd.NO_CALL
        if is_sound:
            self._cursor.settle()
        return CallEnd.COMPLETE if self._has_arguments else CallEnd.BROKEN

    def _read_object(self, *, is_outermost: bool) -> Reading[bool]:
        """False: it is broken."""
        cursor = self._cursor
        if not (yield from cursor.pass_if("{")):
            return False
        yield from cursor.pass_space()
        if (yield from cursor.pass_if("}")):
            return True
        is_first = is_outermost
        while True:
            key = yield from self._read_string()
            if key is None:
                return False
            if is_first and self._first_keys is not None and key not in self._first_keys:
                return False
            is_first = False
            yield from cursor.pass_space()
            if not (yield from cursor.pass_if(":")):
                return False
            yield from cursor.pass_space()
            if not (yield from self._read_value(key, is_outermost=is_outermost)):
                return False
            if self._is_no_call:
                self._tell_text()
                return (yield from cursor.pass_json(lambda _: self._tell_text(), JsonScanner(within="{")))
            yield from cursor.pass_space()
            if (yield from cursor.pass_if("}")):
                return True
            if not (yield from cursor.pass_if(",")):
                return False
            yield from cursor.pass_space()

    def _read_value(self, key: str, *, is_outermost: bool) -> Reading[bool]:
        first = yield from self._cursor.next_character()
        if key == "function" and is_outermost and first == "{":
            return (yield from self._read_object(is_outermost=False))
        if key in ("name", "function") and first == '"' and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENTS_KEYS and not self._has_arguments and self._held_arguments is None:
            return (yield from self._read_arguments(first))
        return (yield from self._cursor.pass_json(lambda _: None))

    def _read_name(self) -> Reading[bool]:
        name = yield from self._read_string()
        if name is None:
            return False
        if name not in self._names:
            self._is_no_call = True
            return True
        self._name = name
        if self._held_arguments is not None:
            self._begin()
            self._tell_arguments(self._held_arguments)
        return True

    def _read_arguments(self, first: str) -> Reading[bool]:
        if first == "{" and self._name is not None:
            self._begin()
            self._has_arguments = yield from self._cursor.pass_json(self._tell_piece)
            return self._has_arguments
        pieces: list[str] = []
        if not (yield from self._cursor.pass_json(pieces.append)):
            return False
        arguments = _as_object("".join(pieces))
        if arguments is None:
            self._is_no_call = True
        elif self._name is None:
            self._held_arguments = arguments
        else:
            self._begin()
            self._tell_arguments(arguments)
        return True

    def _read_string(self) -> Reading[str | None]:
        """Passes a string and decodes it; None: what comes is none, or broken."""
        pieces: list[str] = []
        if (yield from self._cursor.next_character()) != '"':
            return None
        if not (yield from self._cursor.pass_json(pieces.append)):
            return None
        return str(json.loads("".join(pieces)))

    def _begin(self) -> None:
        assert self._name is not None, "a call begins when its name is known"
        self._cursor.settle()
        self._parts.begin_call(self._name)
        self._has_begun = True

    def _tell_piece(self, _: str) -> None:
        self._parts.add_arguments(self._cursor.settle())

    def _tell_arguments(self, arguments: str) -> None:
        self._cursor.settle()
        self._parts.add_arguments(arguments)
        self._has_arguments = True

    def _tell_text(self) -> None:
        self._parts.add_text(self._cursor.settle())


def _as_object(value: str) -> str | None:
    """The JSON text of arguments, given the one of a value that stands for them; None: it cannot."""
    if value.startswith('"'):
        text = str(json.loads(value)).strip(WHITE_SPACE)
        if not text:
            return "{}"
        if not is_json_object(text):
            return None
        # a half of a pair cannot be sent as UTF-8; it stands within a string, where its escape means the same
        return _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    if value.startswith("{"):
        return value
    return "{}" if value == "null" else None
