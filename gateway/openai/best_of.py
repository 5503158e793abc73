"""The best of several choices: those with the highest log-probability per token."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.openai.answer import WholeChoice


def best_choices(choices: Sequence[WholeChoice], *, num_candidates: int, n: int) -> list[WholeChoice]:
    """The best `n` of each prompt's candidates, best first; equals stay as they are.

    `choices` are those of one prompt after the other. With nothing to choose from they keep their order,
    so that a whole answer has the order of a streamed one.
    """
    if num_candidates == n:
        return list(choices)
    best: list[WholeChoice] = []
    for start in range(0, len(choices), num_candidates):
        candidates = choices[start : start + num_candidates]
        best += sorted(candidates, key=lambda choice: -choice.logprob_per_token)[:n]
    return best
