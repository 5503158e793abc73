"""Faults of plain completions."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import (
    COMPLETIONS,
    Planted,
    at,
    crashes,
    ignores,
    loses_a_piece,
    reads,
    tells,
)
from tests.conformance.wrong_server import Asked


def has_prompt(kind: type, *inner: type) -> Any:
    """Prompts that are such a list, whose entries are all of the same type."""

    def holds(asked: Asked) -> bool:
        prompt = asked.document.get("prompt")
        if not at(COMPLETIONS)(asked) or not isinstance(prompt, kind):
            return False
        return not inner or (bool(prompt) and {type(entry) for entry in prompt} == set(inner))

    return holds


def total_is_output(document: dict[str, Any]) -> None:
    document["usage"]["total_tokens"] = document["usage"]["completion_tokens"]


def swap_texts(first: int, second: int) -> Any:
    def change(document: dict[str, Any]) -> None:
        choices = document["choices"]
        if len(choices) > second:
            one, other = choices[first]["text"], choices[second]["text"]
            choices[first]["text"], choices[second]["text"] = other, one

    return change


def one_token(document: dict[str, Any]) -> None:
    document["usage"]["prompt_tokens"] = 1


def without_the_first_character(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice["text"] = choice["text"][1:]


def the_first_is_certain(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        if logprobs := choice.get("logprobs"):
            logprobs["token_logprobs"][0] = 0.0


def one_offset_less(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice["logprobs"]["text_offset"].pop()


def is_mixed(asked: Asked) -> bool:
    prompt = asked.document.get("prompt")
    return at(COMPLETIONS)(asked) and isinstance(prompt, list) and len({type(each) for each in prompt}) > 1


def has_no_such_token(asked: Asked) -> bool:
    prompt = asked.document.get("prompt")
    return at(COMPLETIONS)(asked) and isinstance(prompt, list) and 2**31 - 1 in prompt


FAULTS: list[Planted] = [
    tells(
        "the total is the output, of completions",
        at(COMPLETIONS),
        total_is_output,
        "completions.answer-has-the-shape",
    ),
    loses_a_piece(
        "completions",
        at(COMPLETIONS, prompt="Once upon a time", stream=True),
        "completions.a-stream-is-the-whole-answer",
    ),
    reads(
        "an answer ends when it ends",
        lambda asked: at(COMPLETIONS, "prompt")(asked) and "max_tokens" not in asked.document,
        lambda document: document.update(max_tokens=100),
        "completions.sixteen-tokens-are-the-default",
    ),
    tells(
        "the second prompt is answered first",
        has_prompt(list, str),
        swap_texts(0, 1),
        "completions.several-prompts-are-answered-in-order",
    ),
    tells(
        "choices of all prompts take turns",
        at(COMPLETIONS, n=2),
        swap_texts(1, 2),
        "completions.choices-of-a-prompt-stand-together",
    ),
    tells(
        "token ids are one word",
        has_prompt(list, int),
        one_token,
        "completions.a-prompt-may-be-token-ids",
    ),
    tells(
        "lists of token ids are one word",
        has_prompt(list, list),
        one_token,
        "completions.prompts-may-be-lists-of-token-ids",
    ),
    tells(
        "an echo has lost its first character",
        lambda asked: at(COMPLETIONS, echo=True)(asked) and "logprobs" not in asked.document,
        without_the_first_character,
        "completions.echo-begins-with-the-prompt",
    ),
    ignores("echo", at(COMPLETIONS, stream=True), "completions.echo-arrives-in-a-stream", of="streams"),
    tells(
        "the first token of a prompt is certain",
        at(COMPLETIONS, echo=True, max_tokens=0),
        the_first_is_certain,
        "completions.a-prompt-can-be-scored",
    ),
    tells(
        "there is an offset less than tokens",
        at(COMPLETIONS, logprobs=2),
        one_offset_less,
        "completions.log-probabilities-have-the-shape",
    ),
    ignores("suffix", at(COMPLETIONS), "completions.a-suffix-is-heeded-or-refused"),
    crashes(
        "a completion without a prompt",
        lambda asked: at(COMPLETIONS)(asked) and "prompt" not in asked.document,
        "completions.a-prompt-is-required",
    ),
    crashes("a mixed prompt", is_mixed, "completions.a-mixed-prompt-is-refused"),
    crashes("a token that is none", has_no_such_token, "completions.a-token-that-is-none-is-refused"),
]
