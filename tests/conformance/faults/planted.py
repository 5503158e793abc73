"""Ways to be wrong, from which the planted faults are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance.wrong_server import HEAD_END, Asked, Fault, MakeFault, Memory, RelayedAnswer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"
MAX_WAITED_BYTES = 1_000_000

When = Callable[[Asked], Any]
Change = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Planted:
    """One fault, and all rows that it must fail."""

    name: str
    make: MakeFault
    rows: frozenset[str]
    hangs: bool = False  # its rows fail by the time that they take
    spoils: bool = False  # what it breaks stays broken: rows that come later would see it, too


def at(path: str, *given: str, **equal: Any) -> When:
    """Requests of this path (without its query) that have these fields, and these with such values."""

    def holds(asked: Asked) -> bool:
        if asked.path.partition("?")[0] != path:
            return False
        document = asked.document
        return all(name in document for name in given) and all(
            document.get(name) == value for name, value in equal.items()
        )

    return holds


def planted(name: str, kind: type[Fault], *rows: str, hangs: bool = False, spoils: bool = False) -> Planted:
    """A fault with a class of its own."""
    return Planted(name, kind, frozenset(rows), hangs, spoils)


def reads(name: str, when: When, change: Change, *rows: str) -> Planted:
    """The server takes the JSON of such requests for something else."""
    return Planted(name, lambda memory: _Misreading(memory, when, change), frozenset(rows))


def ignores(field: str, when: When, *rows: str, of: str = "") -> Planted:
    """This field of bodies is dropped silently. `of`: which ones, for the name."""
    name = f"ignores {field} of {of}" if of else f"ignores {field}"
    return reads(name, when, lambda document: document.pop(field, None), *rows)


def tells(name: str, when: When, change: Change, *rows: str) -> Planted:
    """The JSON of whole answers is another one; that of refusals stays."""
    return _answering(name, when, _in_json(change, is_refusal=False), rows)


def complains(name: str, when: When, change: Change, *rows: str) -> Planted:
    """The JSON of refusals is another one."""
    return _answering(name, when, _in_json(change, is_refusal=True), rows)


def answers(name: str, when: When, change: Callable[[RelayedAnswer], Any], *rows: str) -> Planted:
    """Status, headers or bytes of answers, or of the heads of streams, are other ones."""
    return _answering(name, when, change, rows)


def refuses(name: str, when: When, *rows: str, status: int = 400) -> Planted:
    """What should be taken is refused, without naming anything."""

    def change(answer: RelayedAnswer) -> None:
        if answer.status < 300:
            _refuse(answer, status)

    return answers(f"refuses {name}", when, change, *rows)


def crashes(name: str, when: When, *rows: str) -> Planted:
    """What should be refused is a 500."""

    def change(answer: RelayedAnswer) -> None:
        if 400 <= answer.status < 500:
            _refuse(answer, 500)

    return answers(f"crashes at {name}", when, change, *rows)


def takes(name: str, when: When, *rows: str) -> Planted:
    """What should be refused is answered, somehow."""

    def change(answer: RelayedAnswer) -> None:
        if answer.status >= 400:
            answer.status, answer.body = 200, b"{}"

    return answers(f"takes {name}", when, change, *rows)


def misnames(name: str, when: When, *rows: str) -> Planted:
    """Refusals name no field and have no code."""

    def change(document: dict[str, Any]) -> None:
        document["error"].update(param=None, code=None)

    return complains(f"does not name {name}", when, change, *rows)


def streams(name: str, when: When, change: Change, *rows: str) -> Planted:
    """The JSON of events is another one; an event of which `change` leaves {} is not sent."""
    return Planted(name, lambda memory: _Streaming(memory, when, change), frozenset(rows))


def loses_a_piece(name: str, when: When, *rows: str) -> Planted:
    """The first event of such streams that has text never comes."""
    return Planted(f"loses a piece of {name}", lambda memory: _Losing(memory, when), frozenset(rows))


class _Misreading(Fault):
    """Holds a body back until it is whole. What has no plain JSON body goes through as it is."""

    def __init__(self, memory: Memory, when: When, change: Change) -> None:
        super().__init__(memory)
        self._when, self._change = when, change
        self._waiting = b""
        self._is_raw = False

    def request(self, data: bytes) -> bytes:
        self._waiting += data
        ready = b""
        while not self._is_raw and (request := self._next_request()):
            ready += request
        if self._is_raw:
            ready, self._waiting = ready + self._waiting, b""
        return ready

    def _next_request(self) -> bytes:
        head, found, rest = self._waiting.partition(HEAD_END)
        lines = head.split(b"\r\n")
        lengths = [line for line in lines if line.lower().startswith(b"content-length:")]
        if not found:
            self._is_raw = len(head) > MAX_WAITED_BYTES or not head[:1].isupper() or b" HTTP/1" not in head
            return b""
        length = int(lengths[0].partition(b":")[2]) if len(lengths) == 1 else 0
        if length > MAX_WAITED_BYTES or b"expect:" in head.lower() or not lengths:
            self._is_raw = True
            return b""
        if len(rest) < length:
            return b""
        body, self._waiting = rest[:length], rest[length:]
        method, path, _ = lines[0].decode("latin-1").split(" ", 2)
        asked = Asked(method, path, head.lower(), body)
        document = asked.document
        if document and self._when(asked):
            self._change(document)
            body = json.dumps(document).encode()
            head = b"\r\n".join(
                b"Content-Length: %d" % len(body) if line is lengths[0] else line for line in lines
            )
        return head + HEAD_END + body


class _Answering(Fault):
    def __init__(self, memory: Memory, when: When, change: Callable[[RelayedAnswer], Any]) -> None:
        super().__init__(memory)
        self._when, self._change = when, change

    def answer(self, answer: RelayedAnswer) -> None:
        if self._when(answer.asked):
            self._change(answer)


class _Streaming(Fault):
    def __init__(self, memory: Memory, when: When, change: Change) -> None:
        super().__init__(memory)
        self._when, self._change = when, change

    def event(self, event: bytes) -> bytes:
        assert self.answered is not None, "an event belongs to an answer"
        return _changed_event(event, self._change) if self._when(self.answered.asked) else event


class _Losing(_Streaming):
    def __init__(self, memory: Memory, when: When) -> None:
        super().__init__(memory, when, self._lose)
        self._has_lost = False

    def _lose(self, document: dict[str, Any]) -> None:
        delta = document.get("delta")
        texts = [delta if isinstance(delta, str) else (delta or {}).get("text")]
        texts += [
            choice.get("text") or choice.get("delta", {}).get("content")
            for choice in document.get("choices") or ()
        ]
        if any(texts) and not self._has_lost:
            self._has_lost = True
            document.clear()


def _answering(
    name: str, when: When, change: Callable[[RelayedAnswer], Any], rows: tuple[str, ...]
) -> Planted:
    return Planted(name, lambda memory: _Answering(memory, when, change), frozenset(rows))


def _in_json(change: Change, *, is_refusal: bool) -> Callable[[RelayedAnswer], None]:
    def changed(answer: RelayedAnswer) -> None:
        if answer.body.startswith(b"{") and is_refusal == (answer.status >= 400):
            document = json.loads(answer.body)
            change(document)
            answer.body = json.dumps(document).encode()

    return changed


def _changed_event(event: bytes, change: Change) -> bytes:
    head, found, data = event.partition(b"data: {")
    if not found:
        return event
    document = json.loads(b"{" + data)
    change(document)
    return head + b"data: " + json.dumps(document).encode() + b"\n\n" if document else b""


def _refuse(answer: RelayedAnswer, status: int) -> None:
    error = {"message": "It does not work.", "type": "invalid_request_error", "param": None, "code": None}
    answer.status, answer.body = status, json.dumps({"error": error}).encode()
    answer.headers["content-type"] = "application/json"
