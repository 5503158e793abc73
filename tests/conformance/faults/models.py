"""Faults of `/v1/models`."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import Planted, answers, misnames, takes, tells
from tests.conformance.wrong_server import Asked, RelayedAnswer

LIST = "/v1/models"


def of_the_list(asked: Asked) -> bool:
    """In OpenAI's shape."""
    return asked.path == LIST and b"anthropic-version" not in asked.head


def of_one(asked: Asked) -> bool:
    return asked.path.startswith(f"{LIST}/")


def milliseconds(document: dict[str, Any]) -> None:
    for entry in document["data"]:
        entry["created"] = entry["created"] * 1000.0


def file_names(document: dict[str, Any]) -> None:
    for entry in document["data"]:
        entry["id"] += ".gguf"


def another_name(document: dict[str, Any]) -> None:
    document["id"] = "another"


def not_decoded(answer: RelayedAnswer) -> None:
    if b"%66" in answer.asked.head:  # the f of the model's name
        answer.status, answer.body = 404, b'{"detail":"Not Found"}'


FAULTS: list[Planted] = [
    tells("created is a fraction", of_the_list, milliseconds, "models.list-has-the-shape"),
    tells(
        "the list has other names",
        lambda asked: asked.path == LIST,
        file_names,
        "models.list-names-the-model",
        "messages.models-are-listed-for-its-clients",
    ),
    tells(
        "a model has another name than asked for",
        of_one,
        another_name,
        "models.model-is-found-by-name",
        "models.model-is-found-by-an-encoded-name",
        "openai-client.models-are-listed-and-found",
        "openai-js-client.models-and-refusals-are-told",
    ),
    answers("ids are not decoded", of_one, not_decoded, "models.model-is-found-by-an-encoded-name"),
    misnames("an unknown model", of_one, "models.unknown-ids-with-slashes-are-not-found"),
    takes(
        "any key for the list",
        lambda asked: of_the_list(asked) and b"wrong-key" in asked.head,
        "models.list-needs-a-key",
        "openai-client.a-wrong-key-is-an-authentication-error",
    ),
]
