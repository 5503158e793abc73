"""How many requests per second a server completes when it has always enough to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadtest.knee.bootstrap import CONFIDENCE
from loadtest.knee.observations import Floats
from loadtest.knee.probe import Probe

SLOPE_BLOCK_S = 4.0
NORMAL_90 = 1.645
MIN_LOG_SD = 0.01
SKIPPED_SHARE = 1 / 3  # while the first ones, which began together, still end together


@dataclass(frozen=True, slots=True)
class Saturation:
    rate: float  # requests/s
    log_sd: float  # of the rate
    concurrency: int
    num_slots: int  # sequences that the server runs at once

    @property
    def ci90(self) -> tuple[float, float]:
        factor = math.exp(NORMAL_90 * self.log_sd)
        return self.rate / factor, self.rate * factor


def completion_slope(probe: Probe) -> tuple[float, float]:
    """Completions per second after the first third, and the log sd of that. Not completions / duration.

    The slope of completions over time; its spread from the counts of short blocks. (0, inf) without any.
    """
    ends = np.array(
        [row.end_s for row in probe.requests if row.end_s is not None and not row.failed and not row.cut_off]
    )
    begin = probe.warm_cut_s + (probe.end_s - probe.warm_cut_s) * SKIPPED_SHARE
    ends = np.sort(ends[(ends >= begin) & (ends < probe.end_s)])
    if len(ends) < 3:
        return 0.0, math.inf
    rate = slope(ends)
    num_blocks = max(2, int((probe.end_s - begin) / SLOPE_BLOCK_S))
    counts = np.histogram(ends, bins=num_blocks, range=(begin, probe.end_s))[0]
    log_sd = float(counts.std(ddof=1) / math.sqrt(num_blocks) / counts.mean())
    return rate, max(MIN_LOG_SD, log_sd)


def slope(ends: Floats) -> float:
    """Least squares of the running count on time."""
    time = ends - ends.mean()
    count = np.arange(len(ends)) - (len(ends) - 1) / 2
    return float(time @ count / max(float(time @ time), 1e-12))


def slots_in_use(probe: Probe) -> int | None:
    """The most sequences that the server said to run while others waited; None if it told nothing of the
    kind."""
    running = [
        sample.running
        for sample in probe.samples
        if sample.running is not None and sample.waiting is not None and sample.waiting > 0
    ]
    return max(1, round(max(running))) if running else None


assert CONFIDENCE == 0.90, "NORMAL_90 belongs to it"
