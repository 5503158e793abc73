"""What a model thinks before it answers, told from the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.config import ReasoningParser

TAIL_TOKENS = 16  # of a prompt, in which its template may have opened the thoughts


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What a model's thoughts stand between."""

    begin: str
    end: str

    def are_opened_by(self, prompt_tail: str) -> bool:
        """Some templates end the prompt within the thoughts: the output is their rest."""
        return prompt_tail.rstrip().endswith(self.begin)


_MARKERS = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}


def reasoning_markers(parser: ReasoningParser | None, template_source: str) -> ReasoningMarkers | None:
    """None: this model marks no thoughts. `parser` as in ModelConfig."""
    if parser is not None:
        return _MARKERS.get(parser)
    return next((markers for markers in _MARKERS.values() if markers.end in template_source), None)


class ReasoningSplitter:
    """Of one choice. White space at the ends of the thoughts, and before the answer, belongs to neither."""

    def __init__(self, markers: ReasoningMarkers, *, is_open: bool) -> None:
        """`is_open`: the text begins within the thoughts."""
        self._markers = markers
        self._stage: Literal["before", "thinking", "behind", "answering"] = (
            "thinking" if is_open else "before"
        )
        self._held = ""
        self._has_thought = False

    def feed(self, text: str) -> tuple[str, str]:
        """Thoughts, and parts of the answer, that are certain by now."""
        if self._stage == "answering":
            return "", text
        self._held += text
        reasoning = ""
        if self._stage == "before":
            begun = self._held.lstrip()
            if begun.startswith(self._markers.begin):
                self._held = begun[len(self._markers.begin) :]
                self._stage = "thinking"
            elif self._markers.begin.startswith(begun):
                return "", ""  # it may still come
            else:
                self._stage = "answering"
        if self._stage == "thinking":
            reasoning = self._think()
        if self._stage == "behind":
            self._held = self._held.lstrip()
            if self._held:
                self._stage = "answering"
        if self._stage != "answering":
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """What is left of a text that has ended."""
        held, self._held = self._held, ""
        if self._stage == "thinking":
            return (held if self._has_thought else held.lstrip()).rstrip(), ""
        return "", held if self._stage == "before" else ""

    def _think(self) -> str:
        thought, found, rest = self._held.partition(self._markers.end)
        if found:
            self._stage = "behind"
        else:
            thought = thought[: len(thought) - _overlap(thought, self._markers.end)]
            rest = self._held[len(thought) :]
        if not self._has_thought:
            thought = thought.lstrip()
        shown = thought.rstrip()
        self._has_thought = self._has_thought or bool(shown)
        if not found:
            rest = (thought[len(shown) :] if self._has_thought else "") + rest
        self._held = rest
        return shown


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text may begin the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
