"""Faults of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import Planted, at, crashes, misnames, reads, takes, tells
from tests.conformance.wrong_server import Asked

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"


def no_room(document: dict[str, Any]) -> None:
    document["max_model_len"] = 0


def one_token_more(document: dict[str, Any]) -> None:
    document["tokens"] = [*document["tokens"], 40]
    document["count"] = len(document["tokens"])


def the_other_way_round(document: dict[str, Any]) -> None:
    document["add_generation_prompt"] = not document["add_generation_prompt"]


def one_line(document: dict[str, Any]) -> None:
    document["prompt"] = document["prompt"].replace("\n", " ")


def spelled(document: dict[str, Any]) -> None:
    document["token_strs"] = ["a"] * document["count"]


def has_no_text(asked: Asked) -> bool:
    return at(TOKENIZE)(asked) and not {"prompt", "messages"} & set(asked.document)


FAULTS: list[Planted] = [
    tells("there is no room for tokens", at(TOKENIZE), no_room, "tokens.answer-has-the-shape"),
    tells(
        "a prompt has a token more",
        lambda asked: (
            at(TOKENIZE, prompt="Once upon a time")(asked) and b"return_token_strs" not in asked.body
        ),
        one_token_more,
        "tokens.a-prompt-has-the-tokens-of-its-completion",
    ),
    tells(
        "a chat has a token more",
        lambda asked: at(TOKENIZE, "messages")(asked) and "add_generation_prompt" not in asked.document,
        one_token_more,
        "tokens.a-chat-has-the-tokens-of-its-completion",
    ),
    reads(
        "add_generation_prompt means its contrary, of tokens",
        at(TOKENIZE, "add_generation_prompt"),
        the_other_way_round,
        "tokens.no-generation-prompt-on-request",
    ),
    tells("a text has one line", at(DETOKENIZE), one_line, "tokens.tokens-become-the-text-that-they-were"),
    tells(
        "tokens are always spelled",
        lambda asked: at(TOKENIZE)(asked) and "return_token_strs" not in asked.document,
        spelled,
        "tokens.spellings-come-only-if-asked-for",
    ),
    crashes("a token of no vocabulary", at(DETOKENIZE), "tokens.a-token-that-is-none-is-refused"),
    takes("no text at all", has_no_text, "tokens.a-text-is-required"),
    misnames(
        "an unknown model of tokens",
        at(TOKENIZE, model="no-such-model"),
        "tokens.an-unknown-model-is-not-found",
    ),
]
