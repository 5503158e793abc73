"""Faults of headers, and of compressed bodies."""

from __future__ import annotations

import re

from tests.conformance.faults.planted import CHAT, Planted, When, answers, crashes, planted, refuses
from tests.conformance.wrong_server import Asked, Fault, RelayedAnswer


class EchoesAnyId(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        if found := re.search(rb"x-request-id: ([^\r]*)\r", self.requests, re.IGNORECASE):
            answer.headers["x-request-id"] = found[1].decode("latin-1")


class SpellsBearer(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        if b"Authorization: bearer " in self.requests:
            answer.status = 401


def encoded_in(encoding: str) -> When:
    return lambda asked: f"content-encoding: {encoding}\r".encode() in asked.head + b"\r"


def no_id(answer: RelayedAnswer) -> None:
    if answer.status == 404:
        answer.headers.pop("x-request-id", None)


def own_id(answer: RelayedAnswer) -> None:
    answer.headers["x-request-id"] = answer.headers.get("x-request-id", "")[::-1]


def one_of_many(answer: RelayedAnswer) -> None:
    if answer.status in (413, 415):
        answer.status = 400


def is_garbled(asked: Asked) -> bool:
    return b"content-encoding: gzip" in asked.head and asked.body.startswith(b"{")


FAULTS: list[Planted] = [
    answers(
        "refusals have no id",
        lambda asked: True,
        no_id,
        "headers.every-answer-has-a-request-id",
        "openai-client.every-answer-has-a-request-id",
    ),
    answers(
        "ids are its own",
        lambda asked: asked.path == CHAT,
        own_id,
        "headers.a-request-id-is-echoed",
    ),
    planted("echoes any id", EchoesAnyId, "headers.a-hostile-request-id-is-not-echoed"),
    planted("wants Bearer as it spells it", SpellsBearer, "headers.the-scheme-may-be-in-any-case"),
    refuses(
        "a charset",
        lambda asked: b"charset=" in asked.head,
        "headers.a-charset-may-be-named",
        status=415,
    ),
    *(
        refuses(name, encoded_in(encoding), f"bodies.{name}-is-taken")
        for name, encoding in (("gzip", "gzip"), ("deflate", "deflate"), ("brotli", "br"), ("zstd", "zstd"))
    ),
    answers(
        "an unknown encoding is a 400",
        encoded_in("frobnicate"),
        one_of_many,
        "bodies.an-unknown-encoding-is-refused",
    ),
    crashes("what is not what it says", is_garbled, "bodies.a-garbled-body-is-refused"),
    answers("a gzip bomb is a 400", encoded_in("gzip"), one_of_many, "bodies.a-gzip-bomb-is-refused"),
    answers("a zstd bomb is a 400", encoded_in("zstd"), one_of_many, "bodies.a-zstd-bomb-is-refused"),
]
