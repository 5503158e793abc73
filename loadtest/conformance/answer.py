"""What a server answered, whole or as a stream of events, read strictly."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from loadtest.conformance.check import CheckFailed, NotApplicable, check, check_equal, shown

DONE = "[DONE]"
MANDATORY = ("/v1/models", "/v1/chat/completions")  # whoever lacks these is not OpenAI-compatible


@dataclass(frozen=True, slots=True)
class Answer:
    path: str
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        """Raises CheckFailed unless the body is JSON and called so."""
        content_type = self.headers.get("content-type", "")
        check(content_type.startswith("application/json"), f"the content type is {content_type!r}, not JSON")
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise CheckFailed(f"the body is not JSON: {shown(self.body[:80])}") from error

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape: four fields, none missing."""
        document = self.json
        check(
            isinstance(document, dict) and set(document) == {"error"}, f"no OpenAI error: {shown(document)}"
        )
        error: dict[str, Any] = document["error"]
        check(isinstance(error, dict), f"`error` is no object: {shown(error)}")
        check_equal(set(error), {"message", "type", "param", "code"}, "the set of an error's fields")
        check(isinstance(error["message"], str) and error["message"], "an error without a message")
        check(isinstance(error["type"], str), f"the error's type is {shown(error['type'])}")
        for name in ("param", "code"):
            check(error[name] is None or isinstance(error[name], str), f"{name} is {shown(error[name])}")
        return error

    @property
    def says(self) -> str:
        """The message of an error in whatever shape, else the begin of the body."""
        try:
            return str(json.loads(self.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return self.body[:120].decode(errors="replace")

    def ok(self, feature: str | None = None) -> Answer:
        """Itself, if it is a 200. A route that is not there, and a `feature` (a field) that is refused by
        name, are what the server does not claim to have."""
        if self.status == 200:
            return self
        if self._lacks_the_route:
            raise NotApplicable(f"there is no {self.path}")
        if feature is not None and self.status in (400, 422, 501) and self._names(feature):
            raise NotApplicable(f"{feature} is refused: {self.says}")
        raise CheckFailed(f"status {self.status} instead of 200: {self.says}")

    def refused(
        self, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> dict[str, Any]:
        """The error of a refusal with this status, whose `param` is this field or a part of it."""
        if status != 404 and self._lacks_the_route:
            raise NotApplicable(f"there is no {self.path}")
        check(self.status == status, f"status {self.status} instead of {status}: {self.says}")
        error = self.error
        if param is not None:
            named = str(error["param"])
            begins = named == param or named.startswith((f"{param}.", f"{param}["))
            check(begins, f"the error names {error['param']!r}, not {param!r}")
        if code is not None:
            check_equal(error["code"], code, "the error's code")
        return error

    @property
    def _lacks_the_route(self) -> bool:
        if self.path in MANDATORY or self.status not in (404, 405, 501):
            return False
        return b"model_not_found" not in self.body

    def _names(self, feature: str) -> bool:
        try:
            error = json.loads(self.body)["error"]
            return feature in str(error.get("param")) or feature in str(error.get("message"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return False


@dataclass(frozen=True, slots=True)
class ServerEvent:
    name: str | None  # of `event:`
    data: str


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A stream that has ended."""

    answer: Answer
    first_byte_s: float  # after the request was sent
    last_byte_s: float

    def ok(self, feature: str | None = None) -> StreamedAnswer:
        self.answer.ok(feature)
        return self

    @property
    def events(self) -> list[ServerEvent]:
        return parse_events(self.answer.body)

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The JSON of every event but the last one of OpenAI's streams."""
        documents = []
        for event in self.events:
            if event.data in (DONE, ""):  # rows of their own look at these
                continue
            try:
                document = json.loads(event.data)
            except ValueError as error:
                raise CheckFailed(f"an event is not JSON: {shown(event.data)}") from error
            check(isinstance(document, dict), f"an event is no object: {shown(event.data)}")
            check(not document.get("error"), f"an error in the stream: {shown(document.get('error'))}")
            documents.append(document)
        return documents

    @property
    def choice_chunks(self) -> dict[int, list[dict[str, Any]]]:
        """Of each choice its chunks, in order."""
        chunks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for document in self.documents:
            for choice in document.get("choices", []):
                chunks[choice["index"]].append(choice)
        return dict(chunks)

    @property
    def texts(self) -> dict[int, str]:
        """Of each choice the text that its chunks add up to: of chats and of plain completions."""
        return {
            index: "".join(
                (chunk.get("delta") or {}).get("content") or chunk.get("text") or "" for chunk in chunks
            )
            for index, chunks in self.choice_chunks.items()
        }

    @property
    def finish_reasons(self) -> dict[int, list[str]]:
        return {
            index: [chunk["finish_reason"] for chunk in chunks if chunk.get("finish_reason")]
            for index, chunks in self.choice_chunks.items()
        }


def parse_events(body: bytes) -> list[ServerEvent]:
    """Server-sent events (WHATWG HTML, section 9.2), each of which has to be whole by itself.

    Raises CheckFailed where an event is not UTF-8, or is not ended by an empty line.
    """
    blocks = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n")
    check(not blocks[-1].strip(b"\n"), f"the stream ends within an event: {shown(blocks[-1][-80:])}")
    events = []
    for block in blocks[:-1]:
        try:
            lines = block.decode().split("\n")
        except UnicodeDecodeError as error:
            raise CheckFailed(f"an event is not UTF-8: {shown(block[-80:])}") from error
        lines = [line for line in lines if line and not line.startswith(":")]
        if not lines:
            continue  # comments keep a connection alive
        fields: dict[str, list[str]] = defaultdict(list)
        for line in lines:
            name, _, value = line.partition(":")
            check(name in ("data", "event", "id", "retry"), f"a line of a stream is no field: {shown(line)}")
            fields[name].append(value.removeprefix(" "))
        data = "\n".join(fields["data"])
        events.append(ServerEvent(fields["event"][-1] if fields["event"] else None, data))
    return events
