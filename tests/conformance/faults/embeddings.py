"""Faults of `/v1/embeddings`."""

from __future__ import annotations

import base64
import struct
from typing import Any

from tests.conformance.faults.planted import Planted, at, crashes, ignores, misnames, reads, tells
from tests.conformance.wrong_server import Asked

PATH = "/v1/embeddings"


def half_of_the_tokens(document: dict[str, Any]) -> None:
    document["usage"]["total_tokens"] //= 2


def doubles(document: dict[str, Any]) -> None:
    for entry in document["data"]:
        if isinstance(packed := entry["embedding"], str):
            data = base64.b64decode(packed)
            numbers = struct.unpack(f"<{len(data) // 4}f", data)
            entry["embedding"] = base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode()


def in_any_order(document: dict[str, Any]) -> None:
    vectors = [entry["embedding"] for entry in document["data"]]
    for entry, vector in zip(document["data"], reversed(vectors), strict=True):
        entry["embedding"] = vector


def all_are_one(document: dict[str, Any]) -> None:
    for entry in document["data"]:
        if not isinstance(entry["embedding"], str):
            entry["embedding"] = [1.0] * len(entry["embedding"])


def each_number_is_a_text(document: dict[str, Any]) -> None:
    document["input"] = [[number] for number in document["input"]]


def has_numbers(asked: Asked) -> bool:
    given = asked.document.get("input")
    return at(PATH)(asked) and isinstance(given, list) and bool(given) and isinstance(given[0], int)


def has_nothing(asked: Asked) -> bool:
    return at(PATH)(asked) and asked.document.get("input") in ([], "", [""])


FAULTS: list[Planted] = [
    tells("the total is a half", at(PATH), half_of_the_tokens, "embeddings.answer-has-the-shape"),
    tells(
        "base64 is of doubles",
        at(PATH),
        doubles,
        "embeddings.base64-is-the-same-numbers",
        "openai-client.vectors-are-read-in-both-encodings",
        "openai-js-client.vectors-are-read-in-both-encodings",
    ),
    tells("vectors come in any order", at(PATH), in_any_order, "embeddings.a-list-keeps-its-order"),
    tells(
        "all texts have one vector",
        at(PATH),
        all_are_one,
        "embeddings.texts-differ",
        "embeddings.base64-is-the-same-numbers",
    ),
    reads("each token id is a text", has_numbers, each_number_is_a_text, "embeddings.token-ids-are-taken"),
    ignores("dimensions", at(PATH), "embeddings.dimensions-are-kept-or-refused"),
    crashes("an empty input", has_nothing, "embeddings.an-empty-input-is-refused"),
    misnames(
        "a model that makes no embeddings", at(PATH, input="x"), "embeddings.a-generating-model-is-told-apart"
    ),
]
