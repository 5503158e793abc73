"""Resampling of blocks: how far an estimate from a few correlated stretches of load may be off."""

from __future__ import annotations

import numpy as np

from loadtest.knee.observations import Floats

CONFIDENCE = 0.90
NUM_DRAWS = 400


def block_weights(num_blocks: int, num_draws: int, rng: np.random.Generator) -> Floats:
    """How often each block counts in each draw, adding up to `num_blocks`. [num_draws, num_blocks]

    m out of n with m = n / 2: the spread is sqrt(2) times that of the ordinary bootstrap, on purpose. Blocks
    are few, neighbours are still correlated, and bad spells are rare and long; with m = n the intervals of
    simulated searches cover far less than they say.
    """
    m = max(1, round(num_blocks / 2))
    drawn = rng.multinomial(m, np.full(num_blocks, 1 / num_blocks), size=num_draws)
    return np.asarray(drawn * (num_blocks / m), dtype=np.float64)


def interval(draws: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The central interval of the draws."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def design_effect(
    good: Floats, num_requests: Floats, expected: Floats, prior: float = 1.0, prior_blocks: float = 0.0
) -> float:
    """Variance of block means over that of as many independent requests; at least 1.

    `expected` is the fitted share of each block. The prior counts as so many blocks: with a handful of
    blocks, a lucky run of equal ones must not pass for independence.
    """
    variance = np.maximum(expected * (1 - expected), 1e-4)
    ratios = (good - expected) ** 2 * num_requests / variance
    weight = prior_blocks + len(good)
    if weight == 0:
        return 1.0
    return max(1.0, float((prior * prior_blocks + ratios.sum()) / weight))
