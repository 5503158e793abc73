"""Faults of `.../render`."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.faults.planted import CHAT, COMPLETIONS, Planted, answers, at, ignores, misnames, tells
from tests.conformance.wrong_server import RelayedAnswer


def one_token_less(document: dict[str, Any]) -> None:
    document["token_ids"].pop()


def last_first(answer: RelayedAnswer) -> None:
    document = json.loads(answer.body)
    if isinstance(document, list):
        answer.body = json.dumps(document[::-1]).encode()


FAULTS: list[Planted] = [
    tells("a token is missing", at(f"{CHAT}/render"), one_token_less, "rendering.a-chat-has-its-tokens"),
    ignores("temperature", at(f"{CHAT}/render", temperature=0.5), "rendering.sampling-parameters-are-told"),
    answers(
        "the last prompt comes first",
        at(f"{COMPLETIONS}/render"),
        last_first,
        "rendering.each-prompt-is-a-request",
    ),
    tells(
        "an answer beside the prompt",
        at(f"{CHAT}/render", stream=True),
        lambda document: document.update(choices=[]),
        "rendering.nothing-is-generated",
    ),
    misnames(
        "what is wrong with a rendered request",
        at(f"{COMPLETIONS}/render"),
        "rendering.what-is-wrong-is-refused-as-ever",
    ),
]
