"""The search: from an unknown server to a capacity with an interval, within a budget of seconds.

It only asks a prober for load and looks at what came back, so the very same code runs against a live server
and on a virtual clock. The order is: warm up while looking for the concurrency that fills the server;
single requests, to see whether the promise can be kept at all; saturation; the generator's own check at 1.5
times that rate (it comes here and not first because only now is there an upper guess); open-loop probes at
the current estimate, pooled in one fit for each tier; a pair of validation probes on request or where the
budget has room.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest.knee.estimate import Estimate, EstimateInputs, Guess, estimate_capacity, first_guess
from loadtest.knee.failures import (
    NEARLY_ALL,
    commonest_errors,
    failed_share,
    failures_text,
    is_gone,
    nothing_worked,
)
from loadtest.knee.growth import WORTHWHILE_RISE, Growth
from loadtest.knee.guards import (
    NEAR_ESTIMATE,
    ProbeAtEstimate,
    is_hopeless,
    next_rate_outside,
    probe_share,
    twin_is_refuted,
    validation_rates,
)
from loadtest.knee.observations import good_share, percentile_with_failures, requests_of
from loadtest.knee.probe import Probe, ProbeKind
from loadtest.knee.prober import ClientCheck, ClosedLoopPlan, OpenLoopPlan, Prober
from loadtest.knee.result import Phase
from loadtest.knee.saturation import Saturation, completion_slope, slots_in_use
from loadtest.knee.shape_knee import RANGE
from loadtest.knee.slo import SloTier
from loadtest.knee.validity import lag_limit_s

USUAL_BUDGET_S = 300.0
PROBE_S = 60.0
PROBE_SHARE = 0.2  # of the budget, where that is less
MIN_PROBE_S = 5.0
PROBE_OVER_P95_E2EL = 5.0
WARM_CUT_S = 10.0
WARM_CUT_SHARE = 1 / 6
DRAIN_LIMIT_S = 10.0
JITTER = 0.015
MAX_FRACTION = 1.1  # of saturation
BEYOND_FRACTION = 0.98
VALIDATION_S = 120.0
CLIENT_CHECK_S = 6.0
CLIENT_CHECK_FACTOR = 1.5
WARM_UP_S = 30.0
SATURATION_S = 40.0
NUM_UNLOADED = 8
UNLOADED_SHARE = 0.05  # of the budget, at most
INFEASIBLE_CHANCE = 0.01
MAX_UNLOADED_FAILURES = 0.25  # of single requests: two of eight are no accident
MIN_PROBES = 2
SHAPE_FRACTIONS = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class SearchSettings:
    tiers: tuple[SloTier, ...] = ()  # none: only the shape knee
    cvs: tuple[float, ...] = (1.0,)
    budget_s: float = USUAL_BUDGET_S
    tolerance: float = 0.05  # half-width of the interval at which the search may stop
    validate: bool = False
    declared_hit_share: float = 0.0
    max_concurrency: int = 1024
    seed: int = 0
    twins_allowed: bool = True

    @property
    def scale(self) -> float:
        """Of the usual lengths, which shrink with a budget below the usual one."""
        return min(1.0, self.budget_s / USUAL_BUDGET_S)


@dataclass(slots=True)
class Cell:
    """One tier under one arrival law: what is looked for."""

    tier: SloTier
    cv: float
    guess: Guess | None = None
    estimate: Estimate | None = None
    twins_allowed: bool = True
    at_estimate: list[ProbeAtEstimate] = field(default_factory=list)
    validation: tuple[Probe, Probe] | None = None  # below and above the estimate
    reasons: list[str] = field(default_factory=list)

    def is_settled(self, tolerance: float) -> bool:
        """Whether the interval is narrow, and rests on probes on both sides."""
        estimate = self.estimate
        if estimate is None or estimate.is_one_sided(self.tier.attainment):
            return False
        return estimate.half_width <= tolerance

    @property
    def half_width(self) -> float:
        return math.inf if self.estimate is None else self.estimate.half_width


@dataclass(frozen=True, slots=True)
class Progress:
    """What a progress bar shows."""

    phase: str
    seconds_spent: float
    budget_s: float
    cells: Sequence[Cell]


@dataclass(slots=True)
class SearchOutcome:
    """Everything that was found, for verdict.py to judge."""

    settings: SearchSettings
    cells: list[Cell]
    probes: list[Probe] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    client: ClientCheck | None = None
    saturation: Saturation | None = None
    infeasible: set[str] = field(default_factory=set)  # names of tiers that not even an idle server keeps
    stopped: str | None = None  # why there is nothing to judge
    interrupted_in: str | None = None  # the phase in which someone ended the search
    is_client_bound: bool = False
    was_steady: bool = True
    seconds_spent: float = 0.0


class _ServerGone(Exception):  # noqa: N818 - never leaves this module
    """Nothing more can be measured; `stopped` says why."""


class KneeSearch:
    """One search. `run` is called once."""

    def __init__(
        self, prober: Prober, settings: SearchSettings, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        self._prober = prober
        self._settings = settings
        self._on_progress = on_progress
        self._rng = np.random.default_rng([settings.seed, 3])
        self._phase = ""
        self._analysis_s = 0.0  # how long the last look at the data took
        self._saturation_is_sure = False
        self._growth = Growth(settings.max_concurrency)
        cells = [
            Cell(tier, cv, twins_allowed=settings.twins_allowed)
            for cv in settings.cvs
            for tier in settings.tiers
        ]
        self.outcome = SearchOutcome(settings, cells)

    async def run(self) -> SearchOutcome:
        with contextlib.suppress(_ServerGone):  # the outcome says so
            await self._find_out()
        self.outcome.seconds_spent = self._prober.now_s()
        return self.outcome

    def interrupted(self) -> SearchOutcome:
        """What is known, of a search whose `run` was cancelled."""
        self.outcome.interrupted_in = self._phase or "the beginning"
        self.outcome.seconds_spent = self._prober.now_s()
        return self.outcome

    async def _find_out(self) -> None:
        outcome = self.outcome
        if not await self._warm_up():
            return
        if not await self._unloaded():
            return
        if self._settings.tiers and len(outcome.infeasible) == len(self._settings.tiers):
            return
        if not await self._saturate() or not await self._check_client():
            return
        if not self._settings.tiers:
            await self._trace_shape()
            return
        await self._probe_cells()
        await self._validate_cells()

    async def _warm_up(self) -> bool:
        """Whether there is anything to measure. Leaves the server warm, and the concurrency that fills it
        known."""
        with self._in_phase("warm-up"):
            limit_s = max(6.0, WARM_UP_S * self._settings.scale)
            probe = await self._closed(
                ClosedLoopPlan(
                    concurrency=self._growth.concurrency,
                    duration_s=limit_s,
                    drain_limit_s=0.0,
                    next_concurrency=self._growth.next_concurrency,
                )
            )
        self.outcome.was_steady = self._growth.is_steady
        ended = [row for row in probe.requests if row.end_s is not None and not row.cut_off]
        if not ended or all(row.failed for row in ended):
            self.outcome.stopped = (
                f"every request failed: {commonest_errors(ended)}"
                if ended
                else f"no request ended within {limit_s:.3g} s"
            )
            return False
        return True

    async def _unloaded(self) -> bool:
        """Whether single requests succeed. Failures are no broken promise: they say nothing of latency."""
        with self._in_phase("unloaded"):
            probe = await self._closed(
                ClosedLoopPlan(
                    concurrency=1,
                    duration_s=max(2.0, UNLOADED_SHARE * self._settings.budget_s),
                    drain_limit_s=DRAIN_LIMIT_S,
                    kind="unloaded",
                    max_requests=NUM_UNLOADED,
                )
            )
        if failed_share(probe.requests) >= MAX_UNLOADED_FAILURES:
            self.outcome.stopped = failures_text(probe.requests, "single requests")
            return False
        answered = requests_of([row for row in probe.requests if not row.failed])
        for tier in self._settings.tiers:
            good = good_share(answered, tier)
            known = good[~np.isnan(good)]
            if (
                len(known)
                and chance_of_so_few(int(known.sum()), len(known), tier.attainment) < INFEASIBLE_CHANCE
            ):
                self.outcome.infeasible.add(tier.name)
        return True

    async def _saturate(self) -> bool:
        with self._in_phase("saturation"):
            duration_s = max(6.0, SATURATION_S * self._settings.scale)
            probe = await self._closed(
                ClosedLoopPlan(self._growth.concurrency, duration_s, drain_limit_s=0.0, kind="saturation")
            )
        rate, log_sd = completion_slope(probe)
        if rate <= 0 and failed_share(probe.requests) > 0:
            self.outcome.stopped = failures_text(probe.requests, "requests of the saturation probe")
            return False
        if rate <= 0:
            self.outcome.stopped = (
                f"fewer than three requests ended within the {duration_s:.3g} s of the saturation probe; "
                "give a larger --budget or shorter answers"
            )
            return False
        slots = slots_in_use(probe) or self._growth.filling_concurrency
        self.outcome.saturation = Saturation(rate, log_sd, self._growth.concurrency, slots)
        return True

    async def _check_client(self) -> bool:
        assert self.outcome.saturation is not None
        with self._in_phase("client check"):
            rate = CLIENT_CHECK_FACTOR * self.outcome.saturation.rate
            # At a low rate, long enough for some arrivals.
            duration_s = max(1.5, CLIENT_CHECK_S * self._settings.scale)
            client = await self._prober.check_client(rate, duration_s)
            limit_s = lag_limit_s(self._settings.tiers)
            if client.dispatch_lag_p99_s > limit_s:  # once may be another process's doing
                client = min(
                    client,
                    await self._prober.check_client(rate, duration_s),
                    key=lambda one: one.dispatch_lag_p99_s,
                )
        self.outcome.client = client
        if client.refused_share >= NEARLY_ALL:
            self.outcome.stopped = "the server went away: it took no connection of the generator's own check"
            return False
        self.outcome.is_client_bound = client.dispatch_lag_p99_s > limit_s
        return not self.outcome.is_client_bound

    async def _probe_cells(self) -> None:
        settings, outcome = self._settings, self.outcome
        reserved_s = self._validation_cost_s() if settings.validate else 0.0
        with self._in_phase("open-loop probes"):
            while cell := self._next_cell():
                duration_s = self._next_duration_s(settings.budget_s - reserved_s)
                if duration_s is None:
                    break
                rate = self._next_rate(cell)
                probe = await self._open(cell.cv, rate, duration_s, tiers=settings.tiers)
                if self._is_beyond_saturation(cell, probe) and not await self._saturate_again():
                    return
                self._note_guard(cell, probe)
                begin_s = self._prober.now_s()
                for other in outcome.cells:
                    if other.cv == cell.cv:
                        self._estimate(other)
                self._analysis_s = self._prober.now_s() - begin_s
                self._tell()

    def _is_beyond_saturation(self, cell: Cell, probe: Probe) -> bool:
        """Whether the promise was kept at a rate that the server was said not to reach, or hardly."""
        saturation = self.outcome.saturation
        assert saturation is not None
        assert probe.rate is not None
        kept = probe_share(probe, cell.tier) >= cell.tier.attainment
        return kept and probe.rate > BEYOND_FRACTION * saturation.rate and not self._saturation_is_sure

    async def _saturate_again(self) -> bool:
        """With more clients, as the closed loop may have had too few. False if there is nothing to go on
        with."""
        before = self.outcome.saturation
        assert before is not None
        if not self._growth.grow_on():
            self._saturation_is_sure = True
            return True
        if not await self._saturate():
            return False
        if (
            self.outcome.saturation is not None
            and self.outcome.saturation.rate > WORTHWHILE_RISE * before.rate
        ):
            for cell in self.outcome.cells:  # all that was said on its ground is void
                cell.guess = cell.estimate = None
                cell.at_estimate.clear()
        else:
            self._saturation_is_sure = True
        return True

    def _next_cell(self) -> Cell | None:
        """The one whose interval is widest; None when all are narrow enough."""
        open_cells = [
            cell
            for cell in self.outcome.cells
            if cell.tier.name not in self.outcome.infeasible
            and (not cell.is_settled(self._settings.tolerance) or len(self._probes_of(cell)) < MIN_PROBES)
        ]
        return max(open_cells, key=lambda cell: cell.half_width, default=None)

    def _next_rate(self, cell: Cell) -> float:
        saturation = self.outcome.saturation
        assert saturation is not None
        if cell.estimate is None:
            if cell.guess is None:
                cell.guess = first_guess(
                    cell.tier, cell.cv, self.outcome.probes, saturation, self._settings.seed
                )
            rate = cell.guess.rate
        else:
            rate = cell.estimate.rate * (1 + self._rng.uniform(-JITTER, JITTER))
            rate = next_rate_outside(rate, self._probes_of(cell), cell.tier, saturation.rate)
        return min(rate, MAX_FRACTION * saturation.rate)

    def _next_duration_s(self, until_s: float) -> float | None:
        """How long the next probe's arrivals come for; None if there is no time left for one.

        What is left is divided evenly, so that no remainder is wasted.
        """
        left_s = until_s - self._prober.now_s()
        usual_s = self._probe_s()
        overhead_s = min(self._drain_limit_s(), self._stay_s()) + self._analysis_s
        num_left = math.floor(left_s / (usual_s + overhead_s) + 0.25)
        if num_left >= 1:
            return min(max(left_s / num_left - overhead_s, 0.75 * usual_s), 1.5 * usual_s)
        shorter_s = left_s - overhead_s
        return shorter_s if shorter_s >= max(MIN_PROBE_S, 0.4 * usual_s) else None

    def _probe_s(self) -> float:
        """Longer for long answers: what begins and ends inside of a probe should be most of it."""
        usual = min(PROBE_S, PROBE_SHARE * self._settings.budget_s)
        return max(
            MIN_PROBE_S, usual, min(PROBE_OVER_P95_E2EL * self._stay_s(), 0.4 * self._settings.budget_s)
        )

    def _stay_s(self) -> float:
        """p95 of the time that requests stay under open load; before that is known, of single requests,
        doubled."""
        probes = [probe for probe in self.outcome.probes if probe.rate is not None]
        factor = 1.0
        if not probes:
            probes = [probe for probe in self.outcome.probes if probe.kind == "unloaded"]
            factor = 2.0
        e2el = np.concatenate([requests_of(probe.requests).e2el_s for probe in probes[-2:]] or [np.empty(0)])
        stay_s = percentile_with_failures(e2el[np.isfinite(e2el)], 95)
        return 0.0 if math.isnan(stay_s) else factor * stay_s

    def _drain_limit_s(self) -> float:
        return max(DRAIN_LIMIT_S * self._settings.scale, 1.5 * self._stay_s())

    def _probes_of(self, cell: Cell) -> list[Probe]:
        return [probe for probe in self.outcome.probes if probe.kind == "open_loop" and probe.cv == cell.cv]

    def _estimate(self, cell: Cell) -> None:
        saturation = self.outcome.saturation
        assert saturation is not None
        if cell.tier.name in self.outcome.infeasible:
            return
        if cell.guess is None:
            cell.guess = first_guess(cell.tier, cell.cv, self.outcome.probes, saturation, self._settings.seed)
        inputs = EstimateInputs(
            saturation=saturation,
            num_slots=saturation.num_slots,
            background=[probe for probe in self.outcome.probes if probe.kind != "validation"],
            guess=cell.guess.rate,
            guess_log_sd=cell.guess.log_sd,
            twins_allowed=cell.twins_allowed,
        )
        cell.estimate = estimate_capacity(self._probes_of(cell), cell.tier, inputs, self._settings.seed)

    def _note_guard(self, cell: Cell, probe: Probe) -> None:
        """For every tier whose own estimate was near the probe's rate."""
        for other in self.outcome.cells:
            estimate = other.estimate
            if other.cv != cell.cv or estimate is None or probe.rate is None:
                continue
            if abs(probe.rate / estimate.rate - 1) > NEAR_ESTIMATE:
                continue
            share = probe_share(probe, other.tier)
            other.at_estimate.append(ProbeAtEstimate(share, by_twin=estimate.twin is not None))
            if other.twins_allowed and twin_is_refuted(other.at_estimate, other.tier.attainment):
                other.twins_allowed = False
                other.reasons.append(
                    f"the {estimate.method.replace('_', ' ')} was dropped: the two latest probes at its "
                    f"estimate read {other.at_estimate[-2].share:.3f} and {share:.3f}"
                )

    async def _validate_cells(self) -> None:
        """On request, or when there is time left: a pair of probes that the fit never sees."""
        for cell in self.outcome.cells:
            if cell.estimate is None:
                continue
            left_s = self._settings.budget_s - self._prober.now_s()
            cost_s = self._validation_cost_s()
            if left_s < (0.5 if self._settings.validate else 1.0) * cost_s:
                return
            each_s = min(VALIDATION_S, left_s / 2 - self._stay_s())
            if each_s < MIN_PROBE_S:
                return
            with self._in_phase("validation"):
                low, high = self._validation_rates(cell, cell.estimate, each_s)
                below = await self._open(cell.cv, low, each_s, tiers=(), kind="validation")
                above = await self._open(cell.cv, high, each_s, tiers=(cell.tier,), kind="validation")
            cell.validation = (below, above)

    def _validation_rates(self, cell: Cell, estimate: Estimate, each_s: float) -> tuple[float, float]:
        attainment = cell.tier.attainment
        return validation_rates(
            estimate.rate,
            cell.cv,
            attainment,
            lambda rate: float(estimate.share(np.array([rate]), attainment)[0]),
            independent_per_rate=each_s / estimate.design_effect,
        )

    def _validation_cost_s(self) -> float:
        each_s = (
            VALIDATION_S if not self._settings.validate else min(VALIDATION_S, 0.2 * self._settings.budget_s)
        )
        return 2 * (each_s + min(self._drain_limit_s(), self._stay_s()))

    async def _trace_shape(self) -> None:
        assert self.outcome.saturation is not None
        with self._in_phase("open-loop probes"):
            for number, fraction in enumerate(SHAPE_FRACTIONS):
                left_s = self._settings.budget_s - self._prober.now_s()
                each_s = min(
                    PROBE_S,
                    left_s / (len(SHAPE_FRACTIONS) - number) - min(self._drain_limit_s(), self._stay_s()),
                )
                if each_s < MIN_PROBE_S:
                    break
                await self._open(
                    self._settings.cvs[0], fraction * self.outcome.saturation.rate, each_s, tiers=()
                )
        assert (SHAPE_FRACTIONS[0], SHAPE_FRACTIONS[-1]) == RANGE, "the shape's range is fixed"

    async def _closed(self, plan: ClosedLoopPlan) -> Probe:
        return self._keep(await self._prober.closed_loop(plan))

    async def _open(
        self,
        cv: float,
        rate: float,
        duration_s: float,
        tiers: Sequence[SloTier],
        kind: ProbeKind = "open_loop",
    ) -> Probe:
        plan = OpenLoopPlan(
            rate=rate,
            cv=cv,
            duration_s=duration_s,
            warm_cut_s=min(WARM_CUT_S, WARM_CUT_SHARE * duration_s),
            drain_limit_s=self._drain_limit_s(),
            kind=kind,
            early_end=lambda rows, at_s: is_gone(rows, at_s) or is_hopeless(rows, at_s, tiers),
        )
        probe = self._keep(await self._prober.open_loop(plan))
        if is_gone(probe.requests, probe.end_s) or nothing_worked(probe.requests):
            self.outcome.stopped = f"the server went away: {failures_text(probe.requests)}"
            raise _ServerGone
        return probe

    def _keep(self, probe: Probe) -> Probe:
        self.outcome.probes.append(probe)
        self._tell()
        return probe

    @contextlib.contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        self._phase = name
        begin_s = self._prober.now_s()
        self._tell()
        try:
            yield
        finally:
            self.outcome.phases.append(Phase(name=name, seconds=self._prober.now_s() - begin_s))

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                Progress(self._phase, self._prober.now_s(), self._settings.budget_s, self.outcome.cells)
            )


def chance_of_so_few(num_good: int, num_requests: int, share: float) -> float:
    """Of at most `num_good` good requests if each is good with probability `share`."""
    return sum(
        math.comb(num_requests, good) * share**good * (1 - share) ** (num_requests - good)
        for good in range(num_good + 1)
    )
