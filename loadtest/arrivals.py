"""When requests are due: arrival processes of the open loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NANOSECONDS_PER_SECOND = 1_000_000_000
RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes from `start_rps` to `end_rps` over the run.

    By number of requests it changes with their index, as in vLLM; by duration it changes with time.
    """

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def rate_at(self, share: float) -> float:
        """`share`: 0 at the beginning of the run, 1 at its end."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * share
        return float(self.start_rps * (self.end_rps / self.start_rps) ** share)


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
    return _nanoseconds(np.cumsum(_unit_gaps(num_requests, burstiness, rng)) / request_rate)


def arrival_offsets_within_ns(
    duration_s: float, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[int]:
    """The same process, as far as it comes in `duration_s`: how many that are is left to chance."""
    return _nanoseconds(_unit_arrivals(request_rate * duration_s, burstiness, rng) / request_rate)


def ramp_offsets_ns(num_requests: int, ramp: Ramp, burstiness: float, rng: np.random.Generator) -> list[int]:
    """Request i has the rate at i / num_requests, so that a rising ramp spends little time on top."""
    rates = np.array([ramp.rate_at(index / num_requests) for index in range(num_requests)])
    return _nanoseconds(np.cumsum(_unit_gaps(num_requests, burstiness, rng) / rates))


def ramp_offsets_within_ns(
    duration_s: float, ramp: Ramp, burstiness: float, rng: np.random.Generator
) -> list[int]:
    """The rate at time t is that at t / duration_s.

    Arrivals of a process with rate 1 go through the inverse of the expected count until t, which keeps
    the variation of the gaps at every rate.
    """
    start, end = ramp.start_rps, ramp.end_rps
    if start == end:
        return arrival_offsets_within_ns(duration_s, start, burstiness, rng)
    if ramp.strategy == "linear":  # count(t) = start t + slope t² / 2
        slope = (end - start) / duration_s
        counts = _unit_arrivals((start + end) / 2 * duration_s, burstiness, rng)
        return _nanoseconds((np.sqrt(start**2 + 2 * slope * counts) - start) / slope)
    growth = math.log(end / start) / duration_s  # count(t) = start (e^(growth t) - 1) / growth
    counts = _unit_arrivals((end - start) / growth, burstiness, rng)
    return _nanoseconds(np.log1p(counts * growth / start) / growth)


def burstiness_of_cv(cv: float) -> float:
    """The shape of gamma gaps with this coefficient of variation; 0: a constant pace."""
    return math.inf if cv == 0 else 1 / cv**2


def measured_cv(offsets_ns: list[int]) -> float | None:
    """Coefficient of variation of the gaps; None below three arrivals, or if all come at once."""
    gaps = np.diff(np.array(offsets_ns, dtype=np.float64))
    if len(gaps) < 2 or gaps.mean() == 0:
        return None
    return float(gaps.std() / gaps.mean())


def _unit_gaps(count: int, burstiness: float, rng: np.random.Generator) -> NDArray[Any]:
    """Gaps with mean 1."""
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(burstiness, 1.0 / burstiness, size=count)


def _unit_arrivals(until: float, burstiness: float, rng: np.random.Generator) -> NDArray[Any]:
    """Arrivals at rate 1, up to `until`."""
    arrivals: NDArray[Any] = np.zeros(0)
    end = 0.0
    while end <= until:
        more = end + np.cumsum(_unit_gaps(max(64, int((until - end) * 1.1)), burstiness, rng))
        arrivals = np.concatenate([arrivals, more])
        end = float(more[-1])
    return arrivals[arrivals <= until]


def _nanoseconds(times_s: NDArray[Any]) -> list[int]:
    return [int(time) for time in times_s * NANOSECONDS_PER_SECOND]
