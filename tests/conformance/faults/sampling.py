"""Faults of how tokens are drawn."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import (
    CHAT,
    COMPLETIONS,
    Planted,
    at,
    crashes,
    ignores,
    reads,
    takes,
    tells,
)
from tests.conformance.wrong_server import Asked


def clamp_penalties(document: dict[str, Any]) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if name in document:
            document[name] = max(-2, min(2, document[name]))


def one_token_less(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice["token_ids"].pop()


def no_stop_reason(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice["stop_reason"] = None


def the_other_way_round(document: dict[str, Any]) -> None:
    document["add_generation_prompt"] = not document["add_generation_prompt"]


def the_first_is_likely(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice["prompt_logprobs"][0] = {"1": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}


def biases_too_much(asked: Asked) -> bool:
    return at(CHAT, "logit_bias")(asked) and 101 in asked.document["logit_bias"].values()


FAULTS: list[Planted] = [
    ignores("top_p", at(CHAT, top_p=1e-6), "sampling.a-narrow-top-p-is-greedy"),
    ignores("top_k", at(CHAT), "sampling.a-top-k-of-one-is-greedy"),
    ignores("min_p", at(CHAT), "sampling.a-min-p-of-one-is-greedy"),
    reads(
        "each seed is the same",
        at(CHAT, temperature=1.5),
        lambda document: document.update(seed=7),
        "sampling.seeds-differ",
    ),
    ignores(
        "logit_bias",
        at(COMPLETIONS, max_tokens=4),
        "sampling.a-bias-forces-a-token",
        of="few tokens",
    ),
    ignores("logit_bias", at(COMPLETIONS, max_tokens=24), "sampling.a-bias-bars-a-token", of="many tokens"),
    takes("a bias beyond 100", biases_too_much, "sampling.a-bias-of-no-token-is-refused"),
    reads("penalties are clamped", at(CHAT), clamp_penalties, "sampling.penalties-out-of-range-are-named"),
    ignores(
        "frequency_penalty", at(COMPLETIONS, frequency_penalty=2), "sampling.a-penalty-breaks-a-repetition"
    ),
    tells(
        "a token id is missing",
        at(CHAT, return_token_ids=True),
        one_token_less,
        "sampling.token-ids-are-told",
    ),
    ignores(
        "stop_token_ids",
        lambda asked: at(COMPLETIONS)(asked) and "min_tokens" not in asked.document,
        "sampling.a-stop-token-ends-the-answer",
    ),
    tells("nothing stops an answer", at(CHAT), no_stop_reason, "sampling.a-stop-string-is-told"),
    ignores("include_stop_str_in_output", at(CHAT), "sampling.a-stop-string-may-be-kept"),
    ignores("min_tokens", at(COMPLETIONS), "sampling.stops-wait-for-min-tokens"),
    ignores("allowed_token_ids", at(COMPLETIONS), "sampling.only-allowed-tokens-are-drawn"),
    reads(
        "add_generation_prompt means its contrary",
        at(CHAT, "add_generation_prompt", max_tokens=1),
        the_other_way_round,
        "sampling.no-turn-of-the-assistants-on-request",
    ),
    ignores("continue_final_message", at(CHAT), "sampling.a-final-message-is-continued"),
    crashes(
        "a template variable called messages",
        at(CHAT, chat_template_kwargs={"messages": []}),
        "sampling.template-variables-are-taken",
    ),
    tells(
        "the first token of a prompt is likely",
        at(COMPLETIONS, "prompt_logprobs"),
        the_first_is_likely,
        "sampling.prompt-log-probabilities-are-told",
    ),
    ignores("cache_salt", at(CHAT), "sampling.a-salt-keeps-caches-apart"),
]
