"""Faults of refusals."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.faults.planted import (
    CHAT,
    Planted,
    answers,
    at,
    crashes,
    ignores,
    misnames,
    reads,
    refuses,
    takes,
)
from tests.conformance.wrong_server import Asked, RelayedAnswer


def is_chat(asked: Asked) -> bool:
    return asked.path == CHAT


def is_not_json(asked: Asked) -> bool:
    return is_chat(asked) and asked.body in (b"{", b'{"temperature": NaN}')


def is_no_object(asked: Asked) -> bool:
    return is_chat(asked) and asked.body in (b"[]", b"null")


def is_deep(asked: Asked) -> bool:
    return is_chat(asked) and asked.body.startswith(b"[[[[")


def has_huge_digits(asked: Asked) -> bool:
    return is_chat(asked) and b"9" * 100 in asked.body


def has_half_a_pair(asked: Asked) -> bool:
    return is_chat(asked) and rb"\ud800" in asked.body


def has_content(text: str) -> Any:
    def holds(asked: Asked) -> bool:
        messages = asked.document.get("messages")
        return (
            at(CHAT)(asked)
            and isinstance(messages, list)
            and messages[:1] != []
            and (isinstance(messages[0], dict) and messages[0].get("content") == text)
        )

    return holds


def drop_inside(document: dict[str, Any]) -> None:
    for message in document["messages"]:
        message.pop("frobnicate", None)


def the_cause_of_all(answer: RelayedAnswer) -> None:
    """A refusal that quotes what it refuses."""
    sent = answer.asked.head.partition(b"authorization: bearer ")[2].partition(b"\r")[0]
    if answer.status == 401:
        answer.body = answer.body.replace(b"Incorrect", b"Incorrect %b" % sent).replace(b"API key", sent)


def detail(answer: RelayedAnswer) -> None:
    """The 404 of a web framework."""
    if b'"not_found"' in answer.body:
        answer.body = b'{"detail":"Not Found"}'


def conflict(answer: RelayedAnswer) -> None:
    if answer.status in (413, 415):
        answer.status = 400


def no_code(answer: RelayedAnswer) -> None:
    document = json.loads(answer.body)
    if "error" in document:
        document["error"]["code"] = None
    answer.body = json.dumps(document).encode()


def has_long_prompt(asked: Asked) -> bool:
    return is_chat(asked) and b"word word word" in asked.body


def is_plain_text(asked: Asked) -> bool:
    return is_chat(asked) and b"content-type: text/plain" in asked.head


FAULTS: list[Planted] = [
    crashes("what is no JSON", is_not_json, "errors.what-is-not-json-is-refused"),
    crashes("JSON that is no object", is_no_object, "errors.what-is-no-object-is-refused"),
    crashes("deep nesting", is_deep, "errors.deep-nesting-is-refused"),
    misnames("a wrong type", at(CHAT, stream="yes"), "errors.a-wrong-type-is-named"),
    reads(
        "values are clamped",
        at(CHAT, top_p=2),
        lambda document: document.update(top_p=1),
        "errors.a-value-out-of-range-is-named",
    ),
    crashes("huge integers", has_huge_digits, "errors.huge-integers-are-named"),
    crashes("half a surrogate pair", has_half_a_pair, "errors.half-a-surrogate-pair-is-named"),
    refuses("NUL", has_content("a\0b"), "errors.odd-text-is-no-fault-of-the-servers", status=500),
    ignores("frobnicate", at(CHAT), "errors.an-unknown-field-is-not-dropped"),
    reads(
        "fields of messages are dropped",
        has_content("hi"),
        drop_inside,
        "errors.an-unknown-field-inside-is-not-dropped",
    ),
    misnames(
        "an unknown role",
        lambda asked: at(CHAT)(asked) and b'"wizard"' in asked.body,
        "errors.an-unknown-role-is-named",
    ),
    crashes("a chat without messages", at(CHAT, messages=[]), "errors.messages-are-required"),
    takes(
        "a chat without a model",
        lambda asked: at(CHAT, "messages")(asked) and "model" not in asked.document,
        "errors.a-model-is-required",
    ),
    misnames(
        "an unknown model of chats", at(CHAT, model="no/such model"), "errors.an-unknown-model-is-not-found"
    ),
    takes(
        "any key",
        lambda asked: is_chat(asked) and b"wrong-key" in asked.head,
        "errors.a-wrong-key-is-refused",
        "openai-client.a-wrong-key-is-an-authentication-error",
    ),
    answers(
        "a refused key is quoted",
        lambda asked: asked.path == "/v1/models",
        the_cause_of_all,
        "errors.a-key-is-never-repeated",
    ),
    answers("detail instead of error", lambda asked: True, detail, "errors.an-unknown-route-is-not-found"),
    answers(
        "no Allow",
        lambda asked: True,
        lambda answer: answer.headers.pop("allow", None),
        "errors.a-wrong-method-is-not-allowed",
    ),
    refuses("queries", lambda asked: "?beta" in asked.path, "errors.a-query-changes-nothing", status=404),
    answers("plain text is a 400", is_plain_text, conflict, "errors.a-wrong-content-type-is-refused"),
    answers(
        "a large body is a 400",
        lambda asked: is_chat(asked) and b"content-length: 10000000000" in asked.head,
        conflict,
        "errors.a-large-body-is-refused-before-it-comes",
    ),
    answers(
        "too long a prompt has no code",
        has_long_prompt,
        no_code,
        "errors.a-prompt-beyond-the-context-is-refused",
    ),
    reads(
        "max_tokens is clamped",
        at(CHAT, max_tokens=2**31 - 1),
        lambda document: document.update(max_tokens=8),
        "errors.too-many-tokens-are-refused",
    ),
    answers(
        "everything may be tried again",
        lambda asked: True,
        lambda answer: answer.headers.pop("x-should-retry", None),
        "errors.it-says-whether-to-try-again",
    ),
]
