"""Beam search in a few lines, all of it from the beginning at each level: the reference of the tests."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shared.messages import Beam

Likeliest = Callable[[list[int], int], list[tuple[int, float]]]
"""So many of the likeliest tokens after a history, and their log-probabilities, in falling order."""


def naive_beam_search(
    likeliest: Likeliest,
    prompt: list[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    end_token_ids: Collection[int] = (),
) -> list[Beam]:
    """Goes on to the limit whatever it has found."""
    num_likeliest = max(2 * width, width + len(end_token_ids))
    going_on: list[tuple[list[int], float]] = [([], 0.0)]
    results: list[Beam] = []
    for _ in range(max_tokens):
        extended = []
        for output, total in going_on:
            for token_id, logprob in likeliest(prompt + output, num_likeliest):
                if token_id in end_token_ids:
                    results.append(Beam([*output, token_id], total + logprob, "stop", token_id))
                else:
                    extended.append(([*output, token_id], total + logprob))
        going_on = sorted(extended, key=lambda line: -line[1])[:width]
    results += [Beam(output, total, "length") for output, total in going_on]

    def score(beam: Beam) -> float:
        length = len(prompt) + len(beam.token_ids) - (beam.stop_token_id is not None)
        return beam.cumulative_logprob / length**length_penalty

    return sorted(results, key=score, reverse=True)[:width]
