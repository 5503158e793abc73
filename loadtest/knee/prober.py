"""What a search asks for: load of one kind, for a while. It knows neither sockets nor clocks beyond this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadtest.knee.probe import Probe, ProbedRequest, ProbeKind

# Asked about once a second, with the requests that were due in the last 15 s at least, and the seconds
# since the begin. What still runs when it says so is cut off.
EarlyEnd = Callable[[Sequence[ProbedRequest], float], bool]
# Clients from then on, which may only grow; None ends the probe.
NextConcurrency = Callable[[Sequence[ProbedRequest], float], int | None]


@dataclass(frozen=True, slots=True)
class OpenLoopPlan:
    """Requests at `rate` per second on average, for `duration_s`, whatever the server does."""

    rate: float
    cv: float  # of the gaps: 1 is Poisson
    duration_s: float
    warm_cut_s: float
    drain_limit_s: float  # how long answers are waited for after the last arrival
    kind: ProbeKind = "open_loop"
    early_end: EarlyEnd | None = None


@dataclass(frozen=True, slots=True)
class ClosedLoopPlan:
    """`concurrency` clients, each with one request at a time, for `duration_s`."""

    concurrency: int
    duration_s: float
    drain_limit_s: float
    kind: ProbeKind = "closed_loop"
    next_concurrency: NextConcurrency | None = None  # asked about once a second
    max_requests: int | None = None


@dataclass(frozen=True, slots=True)
class ClientCheck:
    """How well the generator keeps a schedule on this machine, without the server's work."""

    rate: float
    delivered_rate: float
    dispatch_lag_p99_s: float
    refused_share: float = 0.0  # of its requests, those that no server took


class Prober(Protocol):
    """Makes load and says what came back. One probe at a time; times are seconds after the search's begin."""

    @property
    def not_reported(self) -> list[str]:
        """What the server has not told so far, in words."""

    def now_s(self) -> float: ...

    async def check_client(self, rate: float, duration_s: float) -> ClientCheck: ...

    async def open_loop(self, plan: OpenLoopPlan) -> Probe: ...

    async def closed_loop(self, plan: ClosedLoopPlan) -> Probe: ...
