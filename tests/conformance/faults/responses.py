"""Faults of `/v1/responses`."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.faults.planted import (
    Planted,
    answers,
    at,
    complains,
    crashes,
    ignores,
    loses_a_piece,
    misnames,
    reads,
    streams,
    takes,
    tells,
)
from tests.conformance.wrong_server import Asked, RelayedAnswer

PATH = "/v1/responses"


def of_one(asked: Asked) -> bool:
    return asked.path.startswith(f"{PATH}/")


def texts_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for item in document["output"] for part in item.get("content", ())]


def no_annotations(document: dict[str, Any]) -> None:
    for part in texts_of(document):
        del part["annotations"]


def only_the_last_item(document: dict[str, Any]) -> None:
    document["input"] = document["input"][-1:]


def shouts(document: dict[str, Any]) -> None:
    for part in texts_of(document):
        part["text"] = part["text"].upper() + "!"


def has_completed(document: dict[str, Any]) -> None:
    document.update(status="completed", incomplete_details=None)


def no_numbers(document: dict[str, Any]) -> None:
    if "sequence_number" in document:
        document["sequence_number"] = 0


def nothing_was_deleted(answer: RelayedAnswer) -> None:
    if answer.asked.method == "DELETE" and answer.status == 200:
        answer.body = answer.body.replace(b"true", b"false")


def texts_are_lost(document: dict[str, Any]) -> None:
    for item in document["data"]:
        item["content"] = [{"type": "input_text", "text": ""}]


def one_field_is_lost(document: dict[str, Any]) -> None:
    for part in texts_of(document):
        fields = json.loads(part["text"])
        fields.pop("colour", None)
        part["text"] = json.dumps(fields)


def one_entry_is_lost(document: dict[str, Any]) -> None:
    for part in texts_of(document):
        part["logprobs"].pop()


def words_of_chats(document: dict[str, Any]) -> None:
    document["error"]["param"] = "max_tokens"


def no_text(document: dict[str, Any]) -> None:
    if document.get("background"):
        document["output"] = []


def still_runs(document: dict[str, Any]) -> None:
    if document.get("status") == "cancelled":
        document["status"] = "in_progress"


def has_one_item(asked: Asked) -> bool:
    given = asked.document.get("input")
    return at(PATH)(asked) and isinstance(given, list) and len(given) == 1 and not has_predecessor(asked)


def has_predecessor(asked: Asked) -> bool:
    return "previous_response_id" in asked.document


def has_form(asked: Asked) -> bool:
    return at(PATH, "text", max_output_tokens=400)(asked)


FAULTS: list[Planted] = [
    tells("texts have no annotations", at(PATH), no_annotations, "responses.answer-has-the-shape"),
    tells(
        "a list of items is shouted at",
        has_one_item,
        shouts,
        "responses.input-may-be-a-list",
    ),
    ignores("instructions", at(PATH), "responses.instructions-are-read"),
    tells(
        "what is cut has completed",
        at(PATH, max_output_tokens=16),
        has_completed,
        "responses.the-limit-leaves-it-incomplete",
    ),
    streams("events have no numbers", at(PATH), no_numbers, "responses.events-come-in-order"),
    loses_a_piece(
        "responses",
        at(PATH, max_output_tokens=24),
        "responses.deltas-add-up",
        "responses.events-come-in-order",
    ),
    answers("a response stays", of_one, nothing_was_deleted, "responses.it-can-be-retrieved-and-deleted"),
    tells(
        "items have lost their texts",
        lambda asked: asked.path.endswith("/input_items"),
        texts_are_lost,
        "responses.its-input-can-be-listed",
    ),
    takes(
        "what has ended to be cancelled",
        lambda asked: asked.path.endswith("/cancel"),
        "responses.what-has-ended-cannot-be-cancelled",
    ),
    reads(
        "everything is kept",
        at(PATH, store=False),
        lambda document: document.update(store=True),
        "responses.it-is-not-kept-against-the-will",
    ),
    ignores("previous_response_id", at(PATH, input="Go on."), "responses.a-conversation-goes-on"),
    reads(
        "only the last item is read",
        lambda asked: at(PATH)(asked) and isinstance(asked.document.get("input"), list),
        only_the_last_item,
        "responses.a-conversation-may-be-sent-along",
        "responses-tools.results-are-taken-back",
    ),
    misnames(
        "an unknown predecessor",
        at(PATH, previous_response_id="resp_none"),
        "responses.an-unknown-predecessor-is-refused",
    ),
    tells("a form is a hint", has_form, one_field_is_lost, "responses.a-form-is-kept"),
    tells(
        "an entry is missing",
        at(PATH, "top_logprobs"),
        one_entry_is_lost,
        "responses.log-probabilities-are-told",
    ),
    tells(
        "metadata are forgotten",
        at(PATH, "metadata"),
        lambda document: document.update(metadata={}),
        "responses.metadata-come-back",
    ),
    ignores(
        "background",
        at(PATH),
        "responses.a-response-may-be-made-in-the-background",
        "responses.the-background-can-be-cancelled",
    ),
    tells(
        "an answer made in the background has no text",
        of_one,
        no_text,
        "responses.a-response-may-be-made-in-the-background",
    ),
    tells(
        "what is cancelled goes on",
        of_one,
        still_runs,
        "responses.the-background-can-be-cancelled",
    ),
    complains(
        "fields are named as those of chats",
        at(PATH, max_output_tokens=0),
        words_of_chats,
        "responses.what-is-wrong-is-named",
    ),
    crashes(
        "unknown ids",
        lambda asked: asked.method == "DELETE" and asked.path == f"{PATH}/resp_none",
        "responses.unknown-ids-are-not-found",
    ),
    crashes(
        "a response without an input",
        lambda asked: at(PATH)(asked) and "input" not in asked.document,
        "responses.an-input-is-required",
    ),
]
