"""What the parsers of all formats have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto

from gateway.openai.tools.call_parser import Part
from gateway.openai.tools.part_collector import PartCollector
from gateway.openai.tools.text_cursor import Reading, TextCursor


class CallEnd(Enum):
    """How the reading of one call came out."""

    COMPLETE = auto()  # its arguments are; what is left of its syntax may still be unsettled
    BROKEN = auto()  # within its arguments, some of which were handed on
    NO_CALL = auto()  # nothing was handed on as one; all that was passed is text


class IncrementalParser(ABC):
    """A `CallParser` that is written as one reader of the whole text.

    The reader has to go on to the end of the text; whatever it leaves unsettled is told as text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._cursor = TextCursor()
        self._parts = PartCollector()
        self._reading = self._read()

    def feed(self, text: str) -> list[Part]:
        self._cursor.feed(text)
        next(self._reading, None)
        return self._parts.fetch()

    def finish(self) -> list[Part]:
        self._cursor.end()
        next(self._reading, None)
        return self._parts.fetch_last()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads the text, to its end."""

    def _tell_text(self) -> None:
        """What was passed is text."""
        self._parts.add_text(self._cursor.settle())

    def _read_text_until(self, marker: str) -> Reading[bool]:
        return (yield from self._cursor.pass_until(marker, self._tell_text))

    def _read_text_to_end(self) -> Reading[None]:
        self._tell_text()
        yield from self._cursor.pass_rest(self._tell_text)

    def _tell_rest_of_call(self) -> Reading[None]:
        """What was passed behind the arguments of a call is text, unless the whole text ends in it."""
        if (yield from self._cursor.next_character()):
            self._tell_text()
        else:
            self._cursor.settle()
