"""Faults of HTTP itself."""

from __future__ import annotations

from tests.conformance.faults.planted import CHAT, Planted, answers, planted, refuses, takes
from tests.conformance.wrong_server import Asked, Fault, RelayedAnswer


class ClosesEach(Fault):
    def ends_connection(self) -> bool:
        return True


class AnswersTheLastFirst(Fault):
    """Of requests that come at once."""

    def answer(self, answer: RelayedAnswer) -> None:
        if self.requests.count(b" HTTP/1.1\r\n") == 2 and b"GET /v1/models" in self.requests:
            answer.body = answer.body.replace(b'"chat.completion"', b'"list"')


class Impatient(Fault):
    """Has no time for bodies that come in more than a few pieces."""

    num_pieces = 0

    def request(self, data: bytes) -> bytes:
        self.num_pieces += 1
        return data

    def answer(self, answer: RelayedAnswer) -> None:
        if self.num_pieces > 4 and len(self.requests) < 4096:
            answer.status = 408


class HangsAtHead(Fault):
    def is_silent(self) -> bool:
        return self.requests.startswith(b"HEAD ")


class NeverCloses(Fault):
    def keeps_connection(self) -> bool:
        return b"Connection: close" in self.requests


class HangsIfHalfClosed(Fault):
    def keeps_connection(self) -> bool:
        return self.has_ended


class ChunksForAll(Fault):
    """Also for those who cannot know them."""

    def answer(self, answer: RelayedAnswer) -> None:
        if b"HTTP/1.0\r\n" in self.requests:
            answer.headers["transfer-encoding"] = "chunked"


class LosesPlaces(Fault):
    """Each client that leaves before its answer takes a place with it. There are two."""

    def answer(self, answer: RelayedAnswer) -> None:
        if self.memory.get("num_lost", 0) >= 2:
            answer.status = 503

    def end_of_requests(self) -> None:
        if self.answered is None:
            self.memory["num_lost"] = self.memory.get("num_lost", 0) + 1


def odd(answer: RelayedAnswer) -> None:
    if answer.status == 400:
        answer.status = 500


def processing(answer: RelayedAnswer) -> None:
    if answer.status == 100:
        answer.status = 102


def is_chunked(asked: Asked) -> bool:
    return asked.path == CHAT and b"transfer-encoding: chunked" in asked.head


def has_garbled_chunk(asked: Asked) -> bool:
    return is_chunked(asked) and asked.body.startswith(b"zz\r\n")


def has_two_lengths(asked: Asked) -> bool:
    return asked.head.count(b"content-length") + asked.head.count(b"transfer-encoding") > 1


def is_no_http(asked: Asked) -> bool:
    return asked.path == ""


FAULTS: list[Planted] = [
    planted(
        "closes each connection",
        ClosesEach,
        "connections.a-connection-is-kept",
        "connections.pipelined-requests-are-answered-in-order",
        "connections.head-has-no-body",
    ),
    planted(
        "answers the last request first",
        AnswersTheLastFirst,
        "connections.pipelined-requests-are-answered-in-order",
    ),
    refuses("chunks", is_chunked, "connections.chunked-bodies-are-read", status=411),
    planted("is impatient", Impatient, "connections.a-slow-body-is-awaited"),
    answers("says 102 instead of 100", lambda asked: True, processing, "connections.continue-is-said"),
    planted("hangs at HEAD", HangsAtHead, "connections.head-has-no-body", hangs=True),
    planted("never closes", NeverCloses, "connections.close-is-obeyed", hangs=True),
    planted("chunks for all", ChunksForAll, "connections.older-clients-are-answered"),
    planted(
        "hangs if half closed",
        HangsIfHalfClosed,
        "connections.a-half-closed-client-is-let-go",
        hangs=True,
    ),
    planted(
        "clients that leave take their places along",
        LosesPlaces,
        "connections.clients-that-leave-harm-nobody",
        spoils=True,
    ),
    takes("two lengths", has_two_lengths, "connections.ambiguous-lengths-are-refused"),
    answers("garbled chunks are a 500", has_garbled_chunk, odd, "connections.garbled-chunks-are-refused"),
    answers("what is no HTTP is a 500", is_no_http, odd, "connections.what-is-no-http-is-refused"),
]
