"""When requests are due: arrival processes of the open loop."""

from __future__ import annotations

import math

import numpy as np

NANOSECONDS_PER_SECOND = 1_000_000_000


def arrival_offsets_ns(
    num_requests: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[int]:
    """Due times after the start of the run, ascending, in nanoseconds.

    The gaps are gamma distributed with shape `burstiness` and mean 1 / `request_rate` (requests/s),
    so their coefficient of variation is 1 / sqrt(burstiness): 1 is a Poisson process, below 1 is
    burstier, infinity is a constant pace. An infinite rate makes everything due at once.

    Unlike vLLM's, the times are not stretched afterwards to end exactly at num_requests / rate:
    that would take the randomness of the count out of an arrival process that is meant to have it.
    """
    if math.isinf(request_rate):
        return [0] * num_requests
    if math.isinf(burstiness):
        gaps_s = np.full(num_requests, 1.0 / request_rate)
    else:
        gaps_s = rng.gamma(burstiness, 1.0 / (request_rate * burstiness), size=num_requests)
    return [int(offset) for offset in np.cumsum(gaps_s) * NANOSECONDS_PER_SECOND]
