"""Mean, deviation and percentiles of a set of latencies, some of which may be infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """`std` is that of the population (numpy's default), as in vLLM's results."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


def describe(values: Iterable[float], percentiles: Iterable[float]) -> Distribution | None:
    """None for no values: an absent latency is not 0. An infinite value makes `std` infinite."""
    ordered = sorted(values)
    if not ordered:
        return None
    is_finite = math.isfinite(ordered[-1])
    return Distribution(
        count=len(ordered),
        mean=float(np.mean(ordered)) if is_finite else math.inf,
        median=percentile(ordered, 50),
        std=float(np.std(ordered)) if is_finite else math.inf,
        percentiles={share: percentile(ordered, share) for share in percentiles},
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at (n - 1) * share / 100 in ascending values, linear between two neighbours.

    Equal to numpy.percentile where all is finite; there, infinities would become not-a-number
    (inf - inf), while here a step into infinity is infinite.
    """
    position = (len(ordered) - 1) * share / 100
    below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
    if below == above:
        return below
    return below + (above - below) * (position - math.floor(position))
