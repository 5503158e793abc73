"""When a server has warmed up: by test, not by count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadtest.knee.observations import Floats, requests_of
from loadtest.knee.probe import ProbedRequest

MEAN_OVER_S = 2.0
NUM_MEANS = 3
MAX_DIFFERENCE = 0.10


def is_steady(
    rows: Sequence[ProbedRequest], now_s: float, since_s: float = 0.0, mean_over_s: float = MEAN_OVER_S
) -> bool:
    """Whether the last three means of TPOT, of requests that ended in each stretch, differ by less than 10 %.

    Where the server tells no token counts, the means are those of whole requests. Only what was sent at
    `since_s` or later counts: before, the load was another one.
    """
    requests = requests_of([row for row in rows if row.end_s is not None and row.due_s >= since_s])
    if not len(requests):
        return False
    latency_s = requests.tpot_s if not np.isnan(requests.tpot_s).all() else requests.e2el_s
    return _means_agree(requests.end_s, latency_s, now_s, mean_over_s)


def _means_agree(end_s: Floats, latency_s: Floats, now_s: float, mean_over_s: float) -> bool:
    means = []
    for back in range(NUM_MEANS):
        last = now_s - back * mean_over_s
        within = (end_s > last - mean_over_s) & (end_s <= last) & np.isfinite(latency_s)
        if not within.any():
            return False
        means.append(float(latency_s[within].mean()))
    return max(means) <= (1 + MAX_DIFFERENCE) * min(means) and math.isfinite(sum(means))
