"""How calls of tools are found in what a model writes, while it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool of this name. What follows belongs to it, up to the next one or to other text."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Part = str | CallBegin | CallArguments
"""A piece of an answer; a string is text that belongs to no call."""


class CallParser(Protocol):
    """Of one choice. What the parts add up to does not depend on how the text is cut into pieces.

    Nothing is lost: what turns out not to be a call of a known tool is text.
    """

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain by now. What may be the begin of a call is held back."""

    def finish(self) -> list[Part]:
        """What is left, of a text that has ended; call it once."""
