"""Faults that OpenAI's clients meet, in Python and in JavaScript."""

from __future__ import annotations

from typing import Any

from loadtest.conformance.rows.openai_client import LONG, ROOM
from tests.conformance.faults.planted import CHAT, Planted, at, loses_a_piece, planted, tells
from tests.conformance.wrong_server import Fault, RelayedAnswer

RESPONSES = "/v1/responses"


class StaysBusy(Fault):
    """Goes on with long work whose client has left, and has no time for others."""

    def request(self, data: bytes) -> bytes:
        if b'"max_tokens":%d' % LONG in self.requests:
            self.memory["is busy"] = True
        return data

    def answer(self, answer: RelayedAnswer) -> None:
        if self.memory.get("is busy"):
            answer.status, answer.body = 503, b"{}"


def perhaps(document: dict[str, Any]) -> None:
    """A boolean of a form that is none, in a chat or in a response."""
    parts = [choice["message"] for choice in document.get("choices", ())]
    parts += [part for item in document.get("output", ()) for part in item.get("content", ())]
    for part in parts:
        for name in ("content", "text"):
            if isinstance(part.get(name), str):
                part[name] = part[name].replace("true", '"perhaps"').replace("false", '"perhaps"')


FAULTS: list[Planted] = [
    loses_a_piece(
        "chats of official clients",
        at(CHAT, max_tokens=20),
        "openai-client.a-chat-is-streamed-as-it-is-whole",
        "openai-client.its-synchronous-form-reads-the-same",
        "openai-js-client.a-chat-is-streamed-as-it-is-whole",
        "openai-js-client.its-stream-helper-comes-to-the-whole-answer",
    ),
    loses_a_piece(
        "responses of official clients",
        at(RESPONSES, max_output_tokens=20),
        "openai-client.a-response-is-streamed-as-it-is-whole",
        "openai-js-client.a-response-is-streamed-as-it-is-whole",
    ),
    tells(
        "a boolean is a text",
        at(CHAT, "response_format", max_tokens=ROOM),
        perhaps,
        "openai-client.a-form-is-parsed",
        "openai-js-client.a-zod-form-is-parsed",
    ),
    tells(
        "a boolean of a response is a text",
        at(RESPONSES, "text", max_output_tokens=ROOM),
        perhaps,
        "openai-client.a-form-of-a-response-is-parsed",
    ),
    planted(
        "work that was left is finished first",
        StaysBusy,
        "openai-client.an-impatient-client-times-out",
        spoils=True,
    ),
]
