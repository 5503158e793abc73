"""Values as Python writes them, made into JSON while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.openai.tools.text_cursor import Reading, TextCursor

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_WORD = re.compile(r"[\w.+-]*")  # a constant or a number
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}  # of a string
_INTEGER = re.compile(r"([+-]?)(0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+)")
_DECIMAL = re.compile(
    r"([+-]?)(0|[1-9](?:_?[0-9])*)?(\.(?:[0-9](?:_?[0-9])*)?)?((?:[eE][+-]?[0-9]+)?)", re.ASCII
)
_MAX_INTEGER_LENGTH = 80  # of those in other bases, which have to be computed with

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"} | {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",  # a line that goes on
}
_NUMBERED_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3}))", re.ASCII
)
_LONGEST_ESCAPE = {"x": 4, "u": 6, "U": 10} | dict.fromkeys("01234567", 4)
_MAX_CODE_POINT = 0x10FFFF


@dataclass(slots=True)
class _Bracket:
    opening: str
    # of a parenthesis that has no comma yet, and so may mean nothing: where among the pieces it stands
    undecided: int | None = None


class PythonLiteral:
    """Reads one value: strings, numbers, True/true, None/null, lists, tuples, dicts, as deep as they are.

    `on_json` gets its JSON text piece by piece, and the cursor settles what that stands for. Escapes that
    Python does not know stay in the string with their backslash, as in Python. Unlike there, lines may break
    in it. Not read: prefixed strings, triple quotes, strings side by side, sets, complex numbers, nan and
    infinity, comments, expressions.
    """

    def __init__(self, cursor: TextCursor, on_json: Callable[[str], None]) -> None:
        self._cursor = cursor
        self._on_json = on_json
        self._open: list[_Bracket] = []
        self._num_undecided = 0
        self._pieces: list[str] = []  # not told, since a parenthesis is undecided

    def read(self) -> Reading[bool]:
        """False: what comes is no such value, or the text ends in it.

        What was read by then has been told, except in a parenthesis that may still turn out to be no tuple.
        """
        cursor = self._cursor
        while True:
            yield from cursor.pass_space()
            character = yield from cursor.next_character()
            if character and character in _CLOSING:
                cursor.pass_over(1)
                self._open_bracket(character)
                yield from cursor.pass_space()
                if not (yield from cursor.stands_before(_CLOSING[character])):
                    if character == "{" and not (yield from self._read_key()):
                        return False
                    continue
                self._decide(is_tuple=True)  # ()
            elif not (yield from self._read_scalar(character)):
                return False
            # a value has ended, if only as an empty bracket that still has to be closed
            if not (yield from self._read_to_next_value()):
                return not self._open

    def _read_to_next_value(self) -> Reading[bool]:
        """Behind a value: closes what is closed there, and passes the comma. False: no value is due."""
        cursor = self._cursor
        while self._open:
            innermost = self._open[-1].opening
            yield from cursor.pass_space()
            has_comma = yield from cursor.pass_if(",")
            if has_comma:
                self._decide(is_tuple=True)
                yield from cursor.pass_space()
            if (yield from cursor.pass_if(_CLOSING[innermost])):
                self._close_bracket()
            elif not has_comma:
                return False
            else:
                self._tell(", ")
                return innermost != "{" or (yield from self._read_key())
        return False

    def _read_key(self) -> Reading[bool]:
        """Of a dict, with its colon. Other constants become strings, as with `json.dumps`."""
        cursor = self._cursor
        yield from cursor.pass_space()
        character = yield from cursor.next_character()
        if character and character in _PLAIN:
            if not (yield from self._read_string()):
                return False
        else:
            word = yield from cursor.pass_run(_WORD)
            key = as_json(word)
            if key is None:
                return False
            self._tell(f'"{key}"')
        yield from cursor.pass_space()
        if not (yield from cursor.pass_if(":")):
            return False
        self._tell(": ")
        return True

    def _read_scalar(self, first: str) -> Reading[bool]:
        if first and first in _PLAIN:
            return (yield from self._read_string())
        word = yield from self._cursor.pass_run(_WORD)
        value = as_json(word)
        if value is None:
            return False
        self._tell(value)
        return True

    def _read_string(self) -> Reading[bool]:
        """False: the text ends within it."""
        cursor = self._cursor
        quote = cursor.pass_over(1)
        self._tell('"')
        while True:
            yield from cursor.pass_pieces(_PLAIN[quote], self._tell_characters)
            character = yield from cursor.next_character()
            if character == "\\":
                yield from self._read_escape()
            elif character:
                cursor.pass_over(1)
                self._tell('"')
                return True
            else:
                return False

    def _read_escape(self) -> Reading[None]:
        ahead = yield from self._cursor.look_ahead(2)
        if ahead[1:] in _LONGEST_ESCAPE:
            ahead = yield from self._cursor.look_ahead(_LONGEST_ESCAPE[ahead[1:]])
        if ahead == "\\":  # the text ends here
            self._cursor.pass_over(1)
            return
        length, character = _unescape(ahead)
        self._cursor.pass_over(length)
        if "\ud800" <= character <= "\udfff":  # a half of a pair, which only an escape can say
            self._tell(f"\\u{ord(character):04x}")
        else:
            self._tell_characters(character)

    def _tell_characters(self, text: str) -> None:
        self._tell(json.dumps(text, ensure_ascii=False)[1:-1])

    def _open_bracket(self, opening: str) -> None:
        if opening == "(":
            self._open.append(_Bracket(opening, undecided=len(self._pieces)))
            self._num_undecided += 1
            self._pieces.append("")
        else:
            self._open.append(_Bracket(opening))
            self._tell(opening)

    def _decide(self, *, is_tuple: bool) -> None:
        """Of the innermost bracket, if it is a parenthesis of which that was not known."""
        innermost = self._open[-1]
        if innermost.undecided is None:
            return
        if is_tuple:
            self._pieces[innermost.undecided] = "["
        innermost.undecided = None
        self._num_undecided -= 1
        self._tell("")

    def _close_bracket(self) -> None:
        innermost = self._open[-1]
        if innermost.opening != "(":
            self._tell(_CLOSING[innermost.opening])
        elif innermost.undecided is None:
            self._tell("]")
        else:
            self._decide(is_tuple=False)
        self._open.pop()

    def _tell(self, text: str) -> None:
        if self._num_undecided:
            self._pieces.append(text)
            return
        text = "".join(self._pieces) + text
        self._pieces.clear()
        self._cursor.settle()
        self._on_json(text)


def as_json(word: str) -> str | None:
    """Of a constant or a number; None: it is none, or JSON cannot say it."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if (match := _INTEGER.fullmatch(word)) is not None:
        return str(int(word, 0)) if len(word) <= _MAX_INTEGER_LENGTH else None
    match = _DECIMAL.fullmatch(word)
    if match is None:
        return None
    sign, integer, fraction, exponent = match.groups()
    if integer is None and fraction in (None, "."):
        return None
    if fraction is not None:
        fraction = fraction if len(fraction) > 1 else ".0"
    return f"{sign.strip('+')}{integer or 0}{fraction or ''}{exponent}".replace("_", "")


def _unescape(ahead: str) -> tuple[int, str]:
    """Length and meaning of the escape that begins here."""
    if ahead[1:2] in _ESCAPES:
        return 2, _ESCAPES[ahead[1]]
    match = _NUMBERED_ESCAPE.match(ahead)
    if match is None:
        return 1, "\\"
    base = 8 if match[4] else 16
    code_point = int(match[1] or match[2] or match[3] or match[4], base)
    if code_point > _MAX_CODE_POINT:
        return 1, "\\"
    return match.end(), chr(code_point)
