"""Faults of CORS."""

from __future__ import annotations

from tests.conformance.faults.planted import Planted, answers
from tests.conformance.wrong_server import Asked, RelayedAnswer

ORIGIN = "access-control-allow-origin"


def is_preflight(asked: Asked) -> bool:
    return asked.method == "OPTIONS"


def has_origin(asked: Asked) -> bool:
    return b"origin: " in asked.head


def wants_a_key(answer: RelayedAnswer) -> None:
    answer.status = 401


def no_delete(answer: RelayedAnswer) -> None:
    answer.headers["access-control-allow-methods"] = "GET, POST"


def only_if_well(answer: RelayedAnswer) -> None:
    if answer.status == 400:
        answer.headers.pop(ORIGIN, None)


def only_if_known(answer: RelayedAnswer) -> None:
    if answer.status == 401:
        answer.headers.pop(ORIGIN, None)


FAULTS: list[Planted] = [
    answers(
        "a preflight needs a key", is_preflight, wants_a_key, "cross-origin.the-question-before-is-answered"
    ),
    answers("pages may not delete", is_preflight, no_delete, "cross-origin.a-page-may-delete"),
    answers("pages cannot read errors", has_origin, only_if_well, "cross-origin.whatever-comes-may-be-read"),
    answers(
        "pages cannot read that a key is wrong",
        has_origin,
        only_if_known,
        "cross-origin.a-refused-key-may-be-read",
    ),
    answers(
        "no header is exposed",
        has_origin,
        lambda answer: answer.headers.pop("access-control-expose-headers", None),
        "cross-origin.the-request-id-is-exposed",
    ),
    answers(
        "any page may use credentials",
        has_origin,
        lambda answer: answer.headers.update({"access-control-allow-credentials": "true"}),
        "cross-origin.caches-keep-origins-apart",
    ),
]
