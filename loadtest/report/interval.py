"""How sure a percentile of one probe is: a bootstrap over stretches of time, as neighbours are alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.knee.bootstrap import CONFIDENCE
from loadtest.knee.observations import Floats, percentile_with_failures

NUM_BLOCKS = 10  # of a probe: fewer say nothing about how they differ
NUM_RESAMPLES = 300


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 90 % interval; infinite where failures reach so far, nan where nothing is known."""

    value: float
    low: float
    high: float


def block_numbers(times_s: Floats, begin_s: float, end_s: float, num_blocks: int = NUM_BLOCKS) -> Floats:
    """The stretch of each request, by when it was due; all stretches are equally long. [num_requests]"""
    if end_s <= begin_s:
        return np.zeros(len(times_s))
    return np.clip(np.floor((times_s - begin_s) / (end_s - begin_s) * num_blocks), 0, num_blocks - 1)


def percentile_estimates(
    latencies_s: Floats, block: Floats, percents: tuple[float, ...], seed: int = 0
) -> list[Estimate]:
    """Of all that is known, failures being infinite.

    Half as many blocks as there are, drawn with replacement, make a sample: why half, see `block_weights`.
    """
    known = ~np.isnan(latencies_s)
    latencies_s, block = latencies_s[known], block[known]
    if not len(latencies_s):
        return [Estimate(np.nan, np.nan, np.nan) for _ in percents]
    rng = np.random.default_rng(seed)
    pieces = [latencies_s[block == number] for number in np.unique(block)]
    drawn = np.empty((NUM_RESAMPLES, len(percents)))
    for row in drawn:
        numbers = rng.integers(len(pieces), size=max(1, len(pieces) // 2))
        sample = np.concatenate([pieces[number] for number in numbers])
        row[:] = np.percentile(sample, percents, method="higher")
    # "nearest": between a number and infinity there is nothing to interpolate.
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail], axis=0, method="nearest")
    return [
        Estimate(percentile_with_failures(latencies_s, percent), float(low[number]), float(high[number]))
        for number, percent in enumerate(percents)
    ]


def mean_estimate(values: Floats, block: Floats, seed: int = 0) -> Estimate:
    """Of the known ones."""
    known = ~np.isnan(values)
    values, block = values[known], block[known]
    if not len(values):
        return Estimate(np.nan, np.nan, np.nan)
    rng = np.random.default_rng(seed)
    numbers = np.unique(block)
    sums = np.array([values[block == number].sum() for number in numbers])
    counts = np.array([(block == number).sum() for number in numbers])
    chosen = rng.integers(len(numbers), size=(NUM_RESAMPLES, max(1, len(numbers) // 2)))
    means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return Estimate(float(values.mean()), float(low), float(high))
