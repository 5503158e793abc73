"""Faults of `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.faults.planted import (
    Planted,
    answers,
    at,
    loses_a_piece,
    planted,
    reads,
    refuses,
    takes,
    tells,
)
from tests.conformance.wrong_server import Asked, Fault, RelayedAnswer

PATH = "/v1/messages"


class EndsWithDone(Fault):
    def stream_end(self) -> bytes:
        assert self.answered is not None, "a stream belongs to an answer"
        return b"data: [DONE]\n\n" if at(PATH)(self.answered.asked) else b""


def openais_shape(answer: RelayedAnswer) -> None:
    if answer.body.startswith(b'{"type":"error"'):
        message = json.loads(answer.body)["error"]["message"]
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        answer.body = json.dumps({"error": error}).encode()


def empty_stop_sequence(document: dict[str, Any]) -> None:
    if document["stop_sequence"] is None:
        document["stop_sequence"] = ""


def ends_its_turn(document: dict[str, Any]) -> None:
    if document["stop_reason"] == "max_tokens":
        document["stop_reason"] = "end_turn"


def no_stop_sequence(document: dict[str, Any]) -> None:
    if document["stop_sequence"]:
        document["stop_sequence"] = None


def only_the_text_of_blocks(document: dict[str, Any]) -> None:
    for message in document["messages"]:
        if isinstance(message["content"], list):
            message["content"] = [block for block in message["content"] if block["type"] == "text"]


def has_blocks(asked: Asked) -> bool:
    """A question in one text block."""
    if not at(PATH, "messages")(asked) or "metadata" in asked.document:
        return False
    return isinstance(asked.document["messages"][0]["content"], list)


def one_line_more(document: dict[str, Any]) -> None:
    document["messages"][0]["content"].append({"type": "text", "text": "\n"})


def close_the_turn(document: dict[str, Any]) -> None:
    if document["messages"][-1]["role"] == "assistant":
        document["messages"].append({"role": "user", "content": "."})


def has_bearer(asked: Asked) -> bool:
    return at(PATH)(asked) and b"authorization: bearer" in asked.head


FAULTS: list[Planted] = [
    tells("there is an empty stop sequence", at(PATH), empty_stop_sequence, "messages.answer-has-the-shape"),
    takes(
        "a message without max_tokens",
        lambda asked: at(PATH)(asked) and "max_tokens" not in asked.document,
        "messages.max-tokens-is-required",
    ),
    tells(
        "what is cut ends its turn",
        at(PATH, max_tokens=4),
        ends_its_turn,
        "messages.max-tokens-ends-with-its-name",
    ),
    planted("[DONE] at the end of messages", EndsWithDone, "messages.events-come-in-order"),
    # Where the whole text comes in one event, events-come-in-order fails as well.
    loses_a_piece("messages", at(PATH, max_tokens=24), "messages.deltas-add-up"),
    tells("no stop sequence is told", at(PATH), no_stop_sequence, "messages.a-stop-sequence-is-told"),
    reads(
        "blocks of a system prompt are left out",
        lambda asked: at(PATH)(asked) and isinstance(asked.document.get("system"), list),
        lambda document: document.pop("system"),
        "messages.system-may-be-text-or-blocks",
    ),
    tells(
        "one token is counted too many",
        at(f"{PATH}/count_tokens"),
        lambda document: document.update(input_tokens=document["input_tokens"] + 1),
        "messages.tokens-can-be-counted",
        "anthropic-client.tokens-are-counted",
    ),
    answers(
        "errors have OpenAI's shape",
        at(PATH),
        openais_shape,
        "messages.errors-have-anthropics-shape",
        "messages.a-wrong-key-is-refused",
        "messages.max-tokens-is-required",
        "messages.images-are-seen-or-refused",
        "messages-tools.an-unknown-tool-is-refused",
        "messages-tools.wrong-tools-are-refused",
        "anthropic-client.refusals-raise-errors-of-their-kind",
    ),
    takes(
        "any key for messages",
        lambda asked: at(PATH)(asked) and b"wrong-key" in asked.head,
        "messages.a-wrong-key-is-refused",
        "anthropic-client.a-wrong-key-is-an-authentication-error",
    ),
    refuses("a bearer token", has_bearer, "messages.a-bearer-token-is-a-key", status=401),
    answers(
        "messages have no request-id",
        at(PATH),
        lambda answer: answer.headers.pop("request-id", None),
        "messages.every-answer-has-a-request-id",
        "anthropic-client.refusals-raise-errors-of-their-kind",
    ),
    reads("text blocks are lines", has_blocks, one_line_more, "messages.text-blocks-are-a-text"),
    reads(
        "images are left out of messages",
        lambda asked: at(PATH)(asked) and b'"image"' in asked.body,
        only_the_text_of_blocks,
        "messages.images-are-seen-or-refused",
    ),
    reads(
        "an answer cannot be begun",
        at(PATH, max_tokens=4),
        close_the_turn,
        "messages.an-answer-may-be-begun",
    ),
    tells(
        "all messages have one id",
        at(PATH),
        lambda document: document.update(id="msg"),
        "messages.ids-differ",
    ),
    tells(
        "a page of models has no end",
        lambda asked: asked.path == "/v1/models" and b"anthropic-version" in asked.head,
        lambda document: document.update(last_id=None),
        "messages.models-are-listed-for-its-clients",
    ),
    refuses("metadata of messages", at(PATH, "metadata"), "messages.clients-fields-are-taken"),
]
