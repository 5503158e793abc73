"""How many clients it takes to keep a server busy: doubled until its throughput stops rising."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadtest.knee.observations import Requests, requests_of
from loadtest.knee.probe import ProbedRequest
from loadtest.knee.steady import is_steady

FIRST_CONCURRENCY = 8
MIN_STAGE_S = 2.0
STAGE_OVER_STAY = 1.25  # each client has begun anew, and some
MIN_ENDED = 5
WORTHWHILE_RISE = 1.15
REQUESTS_PER_MEAN = 10  # of the steadiness test


class Growth:
    """Decides on the clients of a warm-up, once a second, from the requests so far.

    By Little's law, N clients that each wait R for an answer make N / R requests per second. R is put
    together from the TTFT and TPOT of a stage and the mean length of all answers: counting the few requests
    that end within a stage would measure their lengths instead. After the last doubling the load goes on
    until it is steady.
    """

    def __init__(self, max_concurrency: int) -> None:
        self._max = max_concurrency
        self.concurrency = min(FIRST_CONCURRENCY, max_concurrency)
        self.filling_concurrency = self.concurrency  # the most that was worth its doubling
        self.is_steady = False
        self._stage_begin_s = 0.0
        self._last_rate = 0.0
        self._is_grown = False

    def grow_on(self) -> bool:
        """Four times as many clients, after all; False if that is not allowed."""
        if self.concurrency >= self._max:
            return False
        self.concurrency = min(4 * self.concurrency, self._max)
        return True

    def next_concurrency(self, rows: Sequence[ProbedRequest], at_s: float) -> int | None:
        ended = [row for row in rows if row.end_s is not None]
        if len(ended) >= FIRST_CONCURRENCY and all(row.failed for row in ended):
            return None  # nothing will get better
        if not self._is_grown:
            self._grow(rows, at_s)
        elif is_steady(rows, at_s, self._stage_begin_s, self._mean_over_s(ended)):
            self.is_steady = True
            return None
        return self.concurrency

    def _grow(self, rows: Sequence[ProbedRequest], at_s: float) -> None:
        stage_s = at_s - self._stage_begin_s
        if stage_s < MIN_STAGE_S:
            return
        requests = requests_of([row for row in rows if not row.failed])
        of_stage = requests.due_s >= self._stage_begin_s
        if (of_stage & ~np.isnan(requests.end_s)).sum() < MIN_ENDED:
            return
        stay_s = mean_stay_s(requests, of_stage, at_s)
        if stage_s < STAGE_OVER_STAY * stay_s:
            return
        rate = self.concurrency / stay_s
        if rate < WORTHWHILE_RISE * self._last_rate or self.concurrency >= self._max:
            self._is_grown = True
            return
        self._last_rate = rate
        self.filling_concurrency = self.concurrency
        self.concurrency = min(2 * self.concurrency, self._max)
        self._stage_begin_s = at_s

    def _mean_over_s(self, ended: Sequence[ProbedRequest]) -> float:
        """Two seconds, or longer where few requests end in that time: their mean would say nothing."""
        ends = sorted(row.end_s for row in ended[-50:] if row.end_s is not None)
        spacing_s = (ends[-1] - ends[0]) / len(ends) if len(ends) > 1 else 0.0
        return max(2.0, REQUESTS_PER_MEAN * spacing_s)


def mean_stay_s(requests: Requests, of_stage: NDArray[np.bool_], at_s: float) -> float:
    """How long requests of this stage stay, if their answers are as long as all answers on average."""
    waited_s = np.where(np.isnan(requests.first_token_s), at_s, requests.first_token_s) - requests.due_s
    ttft_s = float(waited_s[of_stage].mean())
    tpot_s = requests.tpot_s[of_stage & np.isfinite(requests.tpot_s)]
    num_tokens = requests.num_output_tokens[
        np.isfinite(requests.num_output_tokens) & ~np.isnan(requests.end_s)
    ]
    if len(tpot_s) and len(num_tokens):
        return ttft_s + float(tpot_s.mean()) * max(0.0, float(num_tokens.mean()) - 1)
    e2el_s = requests.e2el_s[of_stage & np.isfinite(requests.e2el_s)]
    return max(ttft_s, float(e2el_s.mean()))
