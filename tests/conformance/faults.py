"""The planted faults, each one that a real server has had or could have, and the rows that it must fail."""

from __future__ import annotations

import base64
import itertools
import json
import re
import struct
from typing import Any

from tests.conformance.wrong_server import Fault, RelayedAnswer

DONE = b"data: [DONE]\n\n"


class JsonFault(Fault):
    """Changes the documents of answers and events."""

    def document(self, document: dict[str, Any]) -> None: ...

    def answer(self, answer: RelayedAnswer) -> None:
        if answer.body.startswith(b"{"):
            answer.body = self._changed(answer.body)

    def event(self, event: bytes) -> bytes:
        head, found, data = event.partition(b"data: {")
        return head + b"data: " + self._changed(b"{" + data) + b"\n\n" if found else event

    def _changed(self, text: bytes) -> bytes:
        document = json.loads(text)
        self.document(document)
        return json.dumps(document).encode()


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


class NoRole(Fault):
    def event(self, event: bytes) -> bytes:
        return event.replace(b'"role":"assistant",', b"") if b"chat.completion.chunk" in event else event


class NewIdForEachChunk(JsonFault):
    numbers = itertools.count()

    def document(self, document: dict[str, Any]) -> None:
        if document.get("object") == "chat.completion.chunk":
            document["id"] = f"chatcmpl-{next(self.numbers)}"


class FinishReasonInAllChunks(Fault):
    def event(self, event: bytes) -> bytes:
        return event.replace(b'"finish_reason":null', b'"finish_reason":"length"')


class SplitCharacters(Fault):
    def event(self, event: bytes) -> bytes:
        return re.sub("[\u0100-\uffff]", "\ufffd", event.decode()).encode()


class EmptyEvents(Fault):
    def event(self, event: bytes) -> bytes:
        return b"event: keepalive\n\n" + event if event == DONE else event


class StreamAsPlainText(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        if "event-stream" in answer.headers.get("content-type", ""):
            answer.headers["content-type"] = "text/plain"


class CachedStream(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        answer.headers.pop("cache-control", None)


class DetailInsteadOfError(Fault):
    """The 404 of a web framework."""

    def answer(self, answer: RelayedAnswer) -> None:
        if b'"not_found"' in answer.body:
            answer.body = b'{"detail":"Not Found"}'


class NoAllow(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        answer.headers.pop("allow", None)


class NeverSaysNotToRetry(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        answer.headers.pop("x-should-retry", None)


class EchoesAnyRequestId(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        if found := re.search(rb"x-request-id: ([^\r]*)\r", self.requests, re.IGNORECASE):
            answer.headers["x-request-id"] = found[1].decode("latin-1")


class OwnRequestIdAlways(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        answer.headers["x-request-id"] = answer.headers.get("x-request-id", "")[::-1]


class ForgetsUnknownFields(Fault):
    def request(self, data: bytes) -> bytes:
        return data.replace(b'"frobnicate": 1', b'"n": 1'.ljust(15))


class Base64OfDoubles(JsonFault):
    def document(self, document: dict[str, Any]) -> None:
        for entry in document.get("data") or ():
            if isinstance(packed := entry.get("embedding"), str):
                data = base64.b64decode(packed)
                numbers = struct.unpack(f"<{len(data) // 4}f", data)
                entry["embedding"] = base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode()


class EmbeddingsInAnyOrder(JsonFault):
    def document(self, document: dict[str, Any]) -> None:
        vectors = [entry["embedding"] for entry in document.get("data") or () if "embedding" in entry]
        for entry, vector in zip(document.get("data") or (), reversed(vectors), strict=False):
            entry["embedding"] = vector


class NoSequenceNumbers(JsonFault):
    def document(self, document: dict[str, Any]) -> None:
        if "sequence_number" in document:
            document["sequence_number"] = 0


class TotalIsOutput(JsonFault):
    def document(self, document: dict[str, Any]) -> None:
        if (usage := document.get("usage")) and document.get("object") == "chat.completion":
            usage["total_tokens"] = usage["completion_tokens"]


class LosesAChoice(JsonFault):
    """Of several, in a whole answer."""

    def document(self, document: dict[str, Any]) -> None:
        if document.get("object") == "chat.completion":
            del document["choices"][2:]


class LosesLogprobsOfAStream(JsonFault):
    def document(self, document: dict[str, Any]) -> None:
        if document.get("object") == "chat.completion.chunk":
            for choice in document["choices"]:
                choice["logprobs"] = None


class AnthropicErrorsInOpenAIsShape(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        if answer.body.startswith(b'{"type":"error"'):
            message = json.loads(answer.body)["error"]["message"]
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            answer.body = json.dumps({"error": error}).encode()


class ArgumentsAsObject(JsonFault):
    """Of tool calls: the API wants a text."""

    def document(self, document: dict[str, Any]) -> None:
        for choice in document.get("choices") or ():
            for call in choice.get("message", {}).get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])


class ClosesEachConnection(Fault):
    def ends_connection(self) -> bool:
        return True


class BombIs400(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        if answer.status == 413 and b"Content-Encoding" in self.requests:
            answer.status = 400


class HangsAtHead(Fault):
    def is_silent(self) -> bool:
        return self.requests.startswith(b"HEAD ")


class BreaksOffLongStreams(Fault):
    """As one does whose buffer for a slow client is full."""

    num_bytes = 0

    def event(self, event: bytes) -> bytes:
        self.num_bytes += len(event)
        return event if self.num_bytes < 60_000 or event == DONE else b""


FAULTS: dict[type[Fault], set[str]] = {
    Fault: set(),  # the relay by itself
    NoDone: {
        "streams.it-ends-with-done",
        "completions.a-stream-is-the-whole-answer",
        "connections.older-clients-are-answered",
        "back-pressure.a-slow-reader-gets-all",
    },
    StopsAtAnyDone: {"streams.text-like-the-end-arrives", "completions.echo-arrives-in-a-stream"},
    UsageForAll: {"streams.usage-comes-only-if-asked-for", "streams.usage-is-the-last-chunk"},
    NoRole: {"streams.the-first-chunk-has-the-role"},
    NewIdForEachChunk: {"streams.chunks-share-their-head"},
    FinishReasonInAllChunks: {
        "streams.each-choice-ends-once",
        "streams.a-greedy-stream-is-the-whole-answer",
        "streams.a-seeded-stream-is-the-whole-answer",
        "streams.choices-interleave-by-index",
    },
    SplitCharacters: {
        "streams.characters-are-never-split",
        "streams.text-like-framing-arrives",
        "completions.echo-arrives-in-a-stream",
    },
    EmptyEvents: {"streams.every-event-has-data"},
    StreamAsPlainText: {"streams.headers-are-those-of-events"},
    CachedStream: {"streams.headers-are-those-of-events"},
    DetailInsteadOfError: {"errors.an-unknown-route-is-not-found"},
    NoAllow: {"errors.a-wrong-method-is-not-allowed"},
    NeverSaysNotToRetry: {"errors.it-says-whether-to-try-again"},
    EchoesAnyRequestId: {"headers.a-hostile-request-id-is-not-echoed"},
    OwnRequestIdAlways: {"headers.a-request-id-is-echoed"},
    ForgetsUnknownFields: {"errors.an-unknown-field-is-not-dropped"},
    Base64OfDoubles: {"embeddings.base64-is-the-same-numbers"},
    EmbeddingsInAnyOrder: {"embeddings.a-list-keeps-its-order"},
    NoSequenceNumbers: {"responses.events-come-in-order"},
    TotalIsOutput: {"chat.usage-adds-up"},
    LosesAChoice: {"chat.n-gives-as-many-choices", "streams.choices-interleave-by-index"},
    LosesLogprobsOfAStream: {"streams.log-probabilities-are-those-of-the-whole-answer"},
    AnthropicErrorsInOpenAIsShape: {
        "messages.errors-have-anthropics-shape",
        "messages.a-wrong-key-is-refused",
        "messages.max-tokens-is-required",
    },
    ArgumentsAsObject: {
        "tools.required-calls-a-tool",
        "tools.a-named-tool-is-called",
        "tools.streamed-pieces-add-up",
    },
    ClosesEachConnection: {
        "connections.a-connection-is-kept",
        "connections.pipelined-requests-are-answered-in-order",
        "connections.head-has-no-body",
    },
    BombIs400: {"bodies.a-gzip-bomb-is-refused", "bodies.a-zstd-bomb-is-refused"},
    HangsAtHead: {"connections.head-has-no-body"},
    BreaksOffLongStreams: {"back-pressure.a-slow-reader-gets-all"},
}
