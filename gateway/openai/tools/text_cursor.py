"""A text that is read while it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from gateway.openai.tools.json_scanner import JsonScanner

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""A reader that yields when it needs more text, and is resumed when there is some or the text has ended."""

_SPACE = re.compile(r"[ \t\n\r]*")


class TextCursor:
    """Reads on and never back. What was passed stays unsettled until its reader knows what it was.

    Whoever waits leaves only a few characters unread (less than a marker), so that no text is looked at
    again and again, however small the pieces are in which it arrives.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._passed: list[str] = []  # and not settled

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._has_ended = True

    def settle(self) -> str:
        """All that was passed since the last time."""
        passed = "".join(self._passed)
        self._passed.clear()
        return passed

    def pass_over(self, count: int) -> str:
        """Of text that has arrived."""
        passed = self._text[self._at : self._at + count]
        self._at += count
        self._passed.append(passed)
        return passed

    def next_character(self) -> Reading[str]:
        """It is not passed. Empty at the end of the text."""
        while self._at == len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._at]

    def look_ahead(self, count: int) -> Reading[str]:
        """So many characters, which are not passed; fewer at the end of the text."""
        while len(self._text) - self._at < count and not self._has_ended:
            yield
        return self._text[self._at : self._at + count]

    def pass_if(self, marker: str) -> Reading[bool]:
        """Passes the marker if it comes next."""
        if not (yield from self.stands_before(marker)):
            return False
        self.pass_over(len(marker))
        return True

    def stands_before(self, marker: str) -> Reading[bool]:
        while True:
            ahead = self._text[self._at : self._at + len(marker)]
            if len(ahead) == len(marker) or self._has_ended or not marker.startswith(ahead):
                return ahead == marker
            yield

    def pass_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Passes all characters of a kind; the pattern is a class of characters, repeated."""
        run: list[str] = []
        yield from self.pass_pieces(pattern, run.append)
        return "".join(run)

    def pass_pieces(self, pattern: re.Pattern[str], on_piece: Callable[[str], None]) -> Reading[None]:
        """`pass_run`, each piece of which is handed on as it arrives."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                on_piece(self.pass_over(match.end() - self._at))
            if self._at < len(self._text) or self._has_ended:
                return
            yield

    def pass_space(self) -> Reading[None]:
        yield from self.pass_run(_SPACE)

    def pass_until(self, marker: str, on_text: Callable[[], None]) -> Reading[bool]:
        """Passes what comes before the marker, or before the end of the text if there is none.

        `on_text` is told whenever some was passed. What may be the begin of the marker waits.
        """
        while True:
            found = self._text.find(marker, self._at)
            certain = found if found >= 0 else len(self._text)
            if found < 0 and not self._has_ended:
                certain -= self._length_of_begin(marker)
            if certain > self._at:
                self.pass_over(certain - self._at)
                on_text()
            if found >= 0:
                return True
            if self._has_ended:
                return False
            yield

    def pass_rest(self, on_text: Callable[[], None]) -> Reading[None]:
        while (yield from self.next_character()):
            self.pass_over(len(self._text) - self._at)
            on_text()

    def pass_json(self, on_piece: Callable[[str], None], scanner: JsonScanner | None = None) -> Reading[bool]:
        """Passes one JSON value; each piece of it is handed on at once.

        False: the text ends within it, or stands before the first character that cannot belong to it.
        """
        scanner = scanner or JsonScanner()
        while True:
            end = scanner.scan(self._text, self._at)
            if end > self._at:
                on_piece(self.pass_over(end - self._at))
            if scanner.is_complete:
                return True
            if scanner.is_broken or self._has_ended:
                return False
            yield

    def _length_of_begin(self, marker: str) -> int:
        """Of the longest begin of the marker with which the text that has arrived ends."""
        longest = min(len(marker) - 1, len(self._text) - self._at)
        return next((k for k in range(longest, 0, -1) if self._text.endswith(marker[:k])), 0)
