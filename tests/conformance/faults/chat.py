"""Faults of whole answers of chats."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import CHAT, Planted, at, ignores, reads, refuses, tells
from tests.conformance.wrong_server import Asked


def milliseconds(document: dict[str, Any]) -> None:
    document["created"] *= 1000


def total_is_output(document: dict[str, Any]) -> None:
    document["usage"]["total_tokens"] = document["usage"]["completion_tokens"]


def says_stop(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice["finish_reason"] = "stop"


def two_choices_at_most(document: dict[str, Any]) -> None:
    del document["choices"][2:]


def no_bytes(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            del entry["bytes"]


def empty_logprobs(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice["logprobs"] = {"content": []}


def only_the_first_stop(document: dict[str, Any]) -> None:
    document["stop"] = document["stop"][:1]


def messages_in_parts(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        message
        for message in document["messages"] or ()
        if isinstance(message, dict) and isinstance(message.get("content"), list)
    ]


def a_line_for_each_part(document: dict[str, Any]) -> None:
    for message in messages_in_parts(document):
        if "text" in message["content"][0]:
            message["content"] = "".join("\n" + part.get("text", "") for part in message["content"])


def only_the_text_of_parts(document: dict[str, Any]) -> None:
    for message in messages_in_parts(document):
        message["content"] = [part for part in message["content"] if part["type"] == "text"]


def thinks(document: dict[str, Any]) -> None:
    document["choices"][0]["message"]["reasoning_content"] = "Hm."


def has_role(role: str) -> Any:
    return lambda asked: any(
        isinstance(message, dict) and message.get("role") == role
        for message in asked.document.get("messages") or ()
    )


def has_null(asked: Asked) -> bool:
    return at(CHAT, "messages")(asked) and None in asked.document.values()


FAULTS: list[Planted] = [
    tells("created is in milliseconds", at(CHAT), milliseconds, "chat.answer-has-the-shape"),
    tells(
        "all answers have one id",
        at(CHAT),
        lambda document: document.update(id="chatcmpl"),
        "chat.ids-differ",
    ),
    tells("the total is the output", at(CHAT), total_is_output, "chat.usage-adds-up"),
    tells("what is cut says stop", at(CHAT, max_tokens=4), says_stop, "chat.max-tokens-ends-with-length"),
    ignores("max_completion_tokens", at(CHAT), "chat.max-completion-tokens-is-the-newer-name"),
    ignores(
        "seed",
        at(CHAT, temperature=0.9),
        "chat.a-seed-repeats-a-sample",
        "streams.a-seeded-stream-is-the-whole-answer",
        "streams.choices-interleave-by-index",
    ),
    tells(
        "there are never more than two choices",
        at(CHAT, n=3),
        two_choices_at_most,
        "chat.n-gives-as-many-choices",
        "streams.choices-interleave-by-index",
    ),
    ignores(
        "stop",
        at(CHAT),
        "chat.a-stop-string-ends-the-answer",
        "chat.the-first-of-several-stop-strings-counts",
        "streams.no-piece-of-a-stop-string-leaks",
        "sampling.a-stop-string-is-told",
        "sampling.a-stop-string-may-be-kept",
        "openai-client.its-stream-helper-comes-to-the-whole-answer",
    ),
    reads(
        "only the first stop string counts",
        lambda asked: at(CHAT)(asked) and isinstance(asked.document.get("stop"), list),
        only_the_first_stop,
        "chat.the-first-of-several-stop-strings-counts",
    ),
    reads("text parts are lines", at(CHAT, "messages"), a_line_for_each_part, "chat.text-parts-are-a-text"),
    reads(
        "images are left out",
        lambda asked: at(CHAT)(asked) and b"image_url" in asked.body,
        only_the_text_of_parts,
        "chat.images-are-seen-or-refused",
    ),
    refuses(
        "the role developer",
        lambda asked: at(CHAT)(asked) and has_role("developer")(asked),
        "chat.all-roles-are-taken",
    ),
    tells("tokens have no bytes", at(CHAT, "logprobs"), no_bytes, "chat.log-probabilities-have-the-shape"),
    tells(
        "there are always log-probabilities",
        lambda asked: at(CHAT)(asked) and "logprobs" not in asked.document,
        empty_logprobs,
        "chat.log-probabilities-come-only-if-asked-for",
    ),
    refuses("null", has_null, "chat.null-means-the-default", "tools.no-tools-are-as-no-field"),
    refuses("metadata", at(CHAT, "metadata"), "chat.bookkeeping-fields-are-taken"),
    tells(
        "the fingerprint is a number",
        at(CHAT),
        lambda document: document.update(system_fingerprint=7),
        "chat.system-fingerprint-is-a-text",
    ),
    tells(
        "only whole answers have thoughts", at(CHAT, max_tokens=256), thinks, "chat.thoughts-are-told-apart"
    ),
    refuses("a low effort", at(CHAT, reasoning_effort="low"), "chat.an-effort-to-reason-is-taken"),
    refuses("the priority 0", at(CHAT, priority=0), "chat.a-priority-is-for-those-who-may"),
]
