"""How long prompts and answers were, for runs that go on longer than any probe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.knee.observations import Floats
from loadtest.knee.probe import Probe

MIN_LENGTHS = 100  # of open-loop probes, to leave the closed loop's out


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the requests seen so far, drawn from in long runs. [num_seen]"""

    num_prompt_tokens: Floats
    num_output_tokens: Floats

    def draw(self, size: tuple[int, ...], rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Prompt and answer of one request stay together."""
        which = rng.integers(len(self.num_prompt_tokens), size=size)
        return self.num_prompt_tokens[which], self.num_output_tokens[which]


def lengths_of(probes: list[Probe]) -> Lengths | None:
    """None if the server does not tell them.

    Of open-loop probes where there are any: what a closed loop leaves unfinished at its end is long on
    average.
    """
    open_loop = [probe for probe in probes if probe.rate is not None]
    for kept in (open_loop, probes):
        pairs = [
            (request.num_prompt_tokens, request.num_output_tokens)
            for probe in kept
            for request in probe.requests
            if request.num_prompt_tokens and request.num_output_tokens
        ]
        if len(pairs) >= MIN_LENGTHS or (pairs and kept is probes):
            prompts, outputs = np.array(pairs, dtype=np.float64).T
            return Lengths(prompts, outputs)
    return None


def or_mean(column: Floats) -> Floats:
    """Of a request that failed, the length of its answer is not known; it would have been an ordinary one."""
    known = ~np.isnan(column)
    if known.all() or not known.any():
        return np.where(known, column, 1.0)
    return np.where(known, column, np.round(column[known].mean()))
