"""The parts of an answer that have been told apart, until they are fetched."""

from __future__ import annotations

from gateway.openai.tools.call_parser import CallArguments, CallBegin, Part
from gateway.openai.tools.json_scanner import WHITE_SPACE


class PartCollector:
    """Joins pieces of one kind, and leaves out white space that is all there is between calls.

    Text with anything else in it keeps all of its bytes, and so does an answer without calls.
    """

    def __init__(self) -> None:
        self.has_calls = False
        self._parts: list[Part] = []
        self._texts: list[str] = []  # behind the parts, as are the arguments: one of the two is empty
        self._arguments: list[str] = []
        self._space: list[str] = []  # with which the text began; nothing else has come yet
        self._text_has_begun = False

    def add_text(self, text: str) -> None:
        if not text:
            return
        if not self._text_has_begun:
            self._space.append(text)
            if not text.strip(WHITE_SPACE):
                return
            text = "".join(self._space)
            self._space.clear()
            self._text_has_begun = True
        self._close_arguments()
        self._texts.append(text)

    def begin_call(self, name: str) -> None:
        self._close_texts()
        self._close_arguments()
        self._parts.append(CallBegin(name))
        self._space.clear()
        self._text_has_begun = False
        self.has_calls = True

    def add_arguments(self, text: str) -> None:
        """Of the call that began last; no text has come since."""
        if text:
            self._arguments.append(text)

    def fetch(self) -> list[Part]:
        """What was not fetched before."""
        self._close_texts()
        self._close_arguments()
        parts, self._parts = self._parts, []
        return parts

    def fetch_last(self) -> list[Part]:
        if self._space and not self.has_calls:
            self._texts = self._space
        return self.fetch()

    def _close_texts(self) -> None:
        if self._texts:
            self._parts.append("".join(self._texts))
            self._texts = []

    def _close_arguments(self) -> None:
        if self._arguments:
            self._parts.append(CallArguments("".join(self._arguments)))
            self._arguments = []
