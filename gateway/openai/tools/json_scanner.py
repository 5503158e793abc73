"""Where a JSON value ends, while its text arrives."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

WHITE_SPACE: Final = " \t\n\r"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string: up to what means something
_SPACE = re.compile(r"[ \t\n\r]*")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class _Due(Enum):
    """What has to come next."""

    VALUE = auto()
    VALUE_OR_END = auto()  # behind the opening bracket of an array
    KEY = auto()
    KEY_OR_END = auto()  # behind the opening brace
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


_SPACE_MAY_PRECEDE = frozenset(
    (_Due.VALUE, _Due.VALUE_OR_END, _Due.KEY, _Due.KEY_OR_END, _Due.COLON, _Due.COMMA_OR_END)
)


def _number_steps() -> dict[str, dict[str, str]]:
    """Of RFC 8259's grammar: part of a number, next character, part that this is in."""
    digits = "0123456789"
    after_integer = {".": "point", "e": "e", "E": "e"}
    return {
        "": {"-": "minus", "0": "zero"} | dict.fromkeys("123456789", "integer"),
        "minus": {"0": "zero"} | dict.fromkeys("123456789", "integer"),
        "zero": after_integer,
        "integer": after_integer | dict.fromkeys(digits, "integer"),
        "point": dict.fromkeys(digits, "fraction"),
        "fraction": {"e": "e", "E": "e"} | dict.fromkeys(digits, "fraction"),
        "e": {"+": "sign", "-": "sign"} | dict.fromkeys(digits, "exponent"),
        "sign": dict.fromkeys(digits, "exponent"),
        "exponent": dict.fromkeys(digits, "exponent"),
    }


_NUMBER_STEPS = _number_steps()
_NUMBER_ENDS = frozenset(("zero", "integer", "fraction", "exponent"))


class JsonScanner:
    """Follows one value of RFC 8259 through the pieces of its text; each character is looked at once.

    It stops behind the value (`is_complete`), or before the first character with which the text can no
    longer become one (`is_broken`). White space before the value counts as a part of it. There is no limit of
    depth, and no recursion.
    """

    def __init__(self, *, within: str = "") -> None:
        """`within`: the bracket that has been opened already; the text goes on behind a first value in it."""
        self.is_complete = False
        self.is_broken = False
        self._open: list[str] = [_CLOSING[within]] if within else []  # what closes each bracket that is open
        self._due = _Due.COMMA_OR_END if within else _Due.VALUE
        self._string_is_key = False
        self._num_hex_due = 0
        self._literal_due = ""
        self._number_part = ""

    def scan(self, text: str, start: int = 0) -> int:
        """Goes on at `start`; returns where it stopped: at the end unless the value has ended or broken."""
        at, end = start, len(text)
        while at < end and not self.is_complete:
            if self._due is _Due.STRING:
                at = self._scan_string(text, at)
            elif self._due is _Due.NUMBER:
                at = self._scan_number(text, at)
            else:
                if self._due in _SPACE_MAY_PRECEDE and text[at] in WHITE_SPACE:
                    at = _run(_SPACE, text, at)
                    continue
                if self._accepts(text[at]):
                    at += 1
                else:
                    self.is_broken = True
            if self.is_broken:
                break
        return at

    def _scan_string(self, text: str, at: int) -> int:
        at = _run(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            if self._string_is_key:
                self._due = _Due.COLON
            else:
                self._end_value()
        elif text[at] == "\\":
            self._due = _Due.ESCAPE
        else:
            self.is_broken = True  # a control character
            return at
        return at + 1

    def _scan_number(self, text: str, at: int) -> int:
        part = self._number_part
        while at < len(text):
            following = _NUMBER_STEPS[part].get(text[at])
            if following is None:
                if part in _NUMBER_ENDS:
                    self._end_value()
                else:
                    self.is_broken = True
                break
            part = following
            at += 1
        self._number_part = part
        return at

    def _accepts(self, character: str) -> bool:
        """Takes one character in, of all that is neither white space nor in a string or number."""
        due = self._due
        if due in (_Due.VALUE_OR_END, _Due.KEY_OR_END, _Due.COMMA_OR_END) and character == self._open[-1]:
            self._open.pop()
            self._end_value()
        elif due in (_Due.VALUE, _Due.VALUE_OR_END):
            return self._begins_value(character)
        elif due in (_Due.KEY, _Due.KEY_OR_END) and character == '"':
            self._due, self._string_is_key = _Due.STRING, True
        elif due is _Due.COLON and character == ":":
            self._due = _Due.VALUE
        elif due is _Due.COMMA_OR_END and character == ",":
            self._due = _Due.KEY if self._open[-1] == "}" else _Due.VALUE
        elif due is _Due.ESCAPE and character in '"\\/bfnrt':
            self._due = _Due.STRING
        elif due is _Due.ESCAPE and character == "u":
            self._due, self._num_hex_due = _Due.HEX, 4
        elif due is _Due.HEX and character in _HEX_DIGITS:
            self._num_hex_due -= 1
            if not self._num_hex_due:
                self._due = _Due.STRING
        elif due is _Due.LITERAL and character == self._literal_due[0]:
            self._literal_due = self._literal_due[1:]
            if not self._literal_due:
                self._end_value()
        else:
            return False
        return True

    def _begins_value(self, character: str) -> bool:
        if character == '"':
            self._due, self._string_is_key = _Due.STRING, False
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
            self._due = _Due.KEY_OR_END if character == "{" else _Due.VALUE_OR_END
        elif character in _LITERALS:
            self._due, self._literal_due = _Due.LITERAL, _LITERALS[character]
        elif character in _NUMBER_STEPS[""]:
            self._due, self._number_part = _Due.NUMBER, _NUMBER_STEPS[""][character]
        else:
            return False
        return True

    def _end_value(self) -> None:
        if self._open:
            self._due = _Due.COMMA_OR_END
        else:
            self.is_complete = True


def is_json_object(text: str) -> bool:
    """Whether the text is one object, with white space around it at most."""
    text = text.strip(WHITE_SPACE)
    scanner = JsonScanner()
    return text.startswith("{") and scanner.scan(text) == len(text) and scanner.is_complete


def _run(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "a run may be empty, so it always matches"
    return match.end()
