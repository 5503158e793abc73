"""Faults under slow clients, and under many."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import CHAT, DONE, Planted, at, planted, reads
from tests.conformance.wrong_server import Fault

NUMBER = "Tell me about the number "


class BreaksOff(Fault):
    """As one does whose buffer for a slow client is full."""

    num_bytes = 0

    def event(self, event: bytes) -> bytes:
        self.num_bytes += len(event)
        return event if self.num_bytes < 60_000 or event == DONE else b""


class OneAtATime(Fault):
    """While a bare socket reads a long stream, nobody else gets an answer."""

    def answer(self, answer: Any) -> None:
        if answer.is_stream and b"user-agent" not in answer.asked.head:
            self.memory["is_busy"] = True

    def is_silent(self) -> bool:
        return bool(self.memory.get("is_busy"))


def another_number(document: dict[str, Any]) -> None:
    content = document["messages"][0]["content"]
    document["messages"][0]["content"] = content.replace("number 7", "number 6")


FAULTS: list[Planted] = [
    planted("breaks off long streams", BreaksOff, "back-pressure.a-slow-reader-gets-all"),
    planted(
        "one at a time", OneAtATime, "back-pressure.a-slow-reader-delays-nobody", hangs=True, spoils=True
    ),
    reads(
        "mixes up streams",
        lambda asked: at(CHAT, stream=True)(asked) and NUMBER.encode() in asked.body,
        another_number,
        "back-pressure.streams-at-once-do-not-mix",
    ),
]
