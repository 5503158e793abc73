"""Faults of streams of chats."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from tests.conformance.faults.planted import (
    CHAT,
    DONE,
    Planted,
    answers,
    at,
    ignores,
    loses_a_piece,
    planted,
    streams,
)
from tests.conformance.wrong_server import Asked, Fault, Memory, RelayedAnswer

STREAM = at(CHAT, stream=True)
PLAIN_FIELDS = {"model", "messages", "max_tokens", "temperature", "seed", "stream"}


class NoDone(Fault):
    def event(self, event: bytes) -> bytes:
        return b"" if event == DONE else event


class StopsAtAnyDone(Fault):
    """Looks for the end of the stream in the text."""

    text = ""

    def event(self, event: bytes) -> bytes:
        if event == DONE or not event.startswith(b"data: {"):
            return event
        for choice in json.loads(event[6:]).get("choices") or ():
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return DONE if "[DONE]" in self.text else event


class UsageForAll(Fault):
    head = b""

    def event(self, event: bytes) -> bytes:
        if event == DONE and self.head:
            return self.head + b'"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":4}}\n\n' + DONE
        if b'"choices"' in event:
            self.head = event[: event.find(b'"choices"')]
        return event


class FinishReasonInAllChunks(Fault):
    def event(self, event: bytes) -> bytes:
        return event.replace(b'"finish_reason":null', b'"finish_reason":"length"')


class SplitCharacters(Fault):
    def event(self, event: bytes) -> bytes:
        return re.sub("[\u3000-\u9fff]", "\ufffd", event.decode()).encode()


class LineBreaksAsTheyAre(Fault):
    """JSON made by pasting texts between quotation marks, of what looks like an event itself."""

    def event(self, event: bytes) -> bytes:
        assert self.answered is not None, "an event belongs to an answer"
        if b"event: error" not in self.answered.asked.body:
            return event
        return event.replace(b"\\\\n", b"\n").replace(b"\\n", b"\n")


class EmptyEvents(Fault):
    def event(self, event: bytes) -> bytes:
        return b"event: keepalive\n\n" + event if event == DONE else event


class IdLines(Fault):
    """As the format allows; but nobody who reads OpenAI's streams line by line expects them."""

    def event(self, event: bytes) -> bytes:
        assert self.answered is not None, "an event belongs to an answer"
        is_first = b'"role":"assistant"' in event and b"user-agent" in self.answered.asked.head
        return event[:-1] + b"id: 1\n\n" if is_first else event


class AllAtTheEnd(Fault):
    """A proxy that waits for the whole body, without a fuss about it."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._held = b""

    def event(self, event: bytes) -> bytes:
        self._held += event
        return b""

    def stream_end(self) -> bytes:
        return self._held


def refusal_as_an_event(answer: RelayedAnswer) -> None:
    if answer.status >= 400:
        answer.status, answer.body = 200, b"data: " + answer.body + b"\n\n"
        answer.headers["content-type"] = "text/event-stream"


def a_new_id(document: dict[str, Any]) -> None:
    document["id"] = f"chatcmpl-{uuid.uuid4()}"


def no_role(document: dict[str, Any]) -> None:
    for choice in document.get("choices") or ():
        choice.get("delta", {}).pop("role", None)


def no_logprobs(document: dict[str, Any]) -> None:
    for choice in document.get("choices") or ():
        choice["logprobs"] = None


def is_plain(asked: Asked) -> bool:
    """A greedy stream without anything else."""
    return at(CHAT, stream=True, temperature=0)(asked) and set(asked.document) == PLAIN_FIELDS


FAULTS: list[Planted] = [
    planted(
        "no [DONE]",
        NoDone,
        "streams.it-ends-with-done",
        "completions.a-stream-is-the-whole-answer",
        "connections.older-clients-are-answered",
        "back-pressure.a-slow-reader-gets-all",
    ),
    planted(
        "stops at any [DONE]",
        StopsAtAnyDone,
        "streams.text-like-the-end-arrives",
        "completions.echo-arrives-in-a-stream",
    ),
    planted(
        "usage for all",
        UsageForAll,
        "streams.usage-comes-only-if-asked-for",
        "streams.usage-is-the-last-chunk",
    ),
    streams("no role", STREAM, no_role, "streams.the-first-chunk-has-the-role"),
    streams("a new id for each chunk", STREAM, a_new_id, "streams.chunks-share-their-head"),
    planted(
        "a finish reason in all chunks",
        FinishReasonInAllChunks,
        "streams.each-choice-ends-once",
        "streams.a-greedy-stream-is-the-whole-answer",
        "streams.a-seeded-stream-is-the-whole-answer",
        "streams.choices-interleave-by-index",
        "tools.streamed-pieces-add-up",
    ),
    planted(
        "split characters",
        SplitCharacters,
        "streams.characters-are-never-split",
        "tools.hostile-arguments-arrive",
        "completions.echo-arrives-in-a-stream",
        "responses.hostile-text-arrives",
        "messages.hostile-text-arrives",
    ),
    planted(
        "line breaks as they are",
        LineBreaksAsTheyAre,
        "streams.text-like-framing-arrives",
        "tools.hostile-arguments-arrive",
        "completions.echo-arrives-in-a-stream",
        "responses.hostile-text-arrives",
        "messages.hostile-text-arrives",
    ),
    planted(
        "empty events",
        EmptyEvents,
        "streams.every-event-has-data",
        "streams.clients-that-read-lines-can-read-it",
    ),
    planted("lines of ids", IdLines, "streams.clients-that-read-lines-can-read-it"),
    answers(
        "a stream is plain text",
        STREAM,
        lambda answer: answer.headers.update({"content-type": "text/plain"}) if answer.is_stream else None,
        "streams.headers-are-those-of-events",
    ),
    answers(
        "a stream may be cached",
        STREAM,
        lambda answer: answer.headers.pop("cache-control", None),
        "streams.headers-are-those-of-events",
    ),
    loses_a_piece(
        "greedy chats",
        is_plain,
        "streams.a-greedy-stream-is-the-whole-answer",
        "back-pressure.streams-at-once-do-not-mix",
    ),
    ignores("stop", STREAM, "streams.no-piece-of-a-stop-string-leaks", of="streams"),
    streams(
        "no log-probabilities",
        STREAM,
        no_logprobs,
        "streams.log-probabilities-are-those-of-the-whole-answer",
    ),
    planted("all at the end", AllAtTheEnd, "streams.it-begins-before-it-ends"),
    answers(
        "refusals are events",
        STREAM,
        refusal_as_an_event,
        "streams.what-is-refused-is-no-stream",
        "openai-client.refusals-raise-errors-of-their-kind",
    ),
]
