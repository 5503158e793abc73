"""A server and a generator on a virtual clock, in one process: the search's own test bench.

The server is the simulator's batching model, so the true knee can be had from a long run of the same model.
Hours of load take seconds of computing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from loadtest.arrivals import NANOSECONDS_PER_SECOND, arrival_offsets_within_ns, burstiness_of_cv
from loadtest.knee.observations import Floats
from loadtest.knee.probe import Probe, ProbedRequest, ServerSample
from loadtest.knee.prober import ClientCheck, ClosedLoopPlan, OpenLoopPlan
from loadtest.simulator.batching_model import BatchingModel, BatchingParameters

WATCH_INTERVAL_S = 1.0
IN_FLIGHT_INTERVAL_S = 0.25
CLIENT_CHECK_SEED = 7
PAUSE_AFTER_FAILURE_S = 0.25  # of a client in a closed loop, as the live ones make


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Lognormal lengths of prompts and answers."""

    prompt_mean: float = 600.0
    prompt_cv: float = 0.8
    output_mean: float = 150.0
    output_cv: float = 0.7
    output_max: int = 4000

    def draw(self, size: int | tuple[int, ...], rng: np.random.Generator) -> tuple[Floats, Floats]:
        prompts = _lognormal(self.prompt_mean, self.prompt_cv, size, rng)
        outputs = np.minimum(_lognormal(self.output_mean, self.output_cv, size, rng), self.output_max)
        return prompts, outputs


@dataclass(frozen=True, slots=True)
class Faults:
    """What may be wrong with the generator or the server, on purpose."""

    client_cost_s: float = 0.0  # of processor time for each request: a generator that is too slow
    hit_share: float = 0.0  # that the server's cache counters claim
    lost_records: float = 0.0  # share of requests that the generator forgets to record
    failing: float = 0.0  # share of requests that the server refuses at once
    error: str = "http_status"  # what it says then
    fails_after_s: float = 0.0  # of the search: before that, it refuses nothing
    failing_kinds: tuple[str, ...] = ()  # of probes in which it refuses; empty: in all
    throttled: float = 0.0  # share that the server counts as refused by a limit
    tells_lengths: bool = True


@dataclass
class SimulatedProber:
    parameters: BatchingParameters = field(default_factory=BatchingParameters)
    lengths: LengthLaw = field(default_factory=LengthLaw)
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    not_reported: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    async def check_client(self, rate: float, duration_s: float) -> ClientCheck:
        due = arrival_times_s(rate, 1.0, duration_s, np.random.default_rng(CLIENT_CHECK_SEED))
        sent = np.array(list(self._dispatch(due)))
        self._now_s += duration_s
        lag = float(np.percentile(sent - due, 99)) if len(due) else 0.0
        in_time = float((sent < duration_s).sum())
        return ClientCheck(rate=rate, delivered_rate=in_time / duration_s, dispatch_lag_p99_s=lag)

    async def open_loop(self, plan: OpenLoopPlan) -> Probe:
        due = arrival_times_s(plan.rate, plan.cv, plan.duration_s, self._rng)
        run = _Run(self, plan.drain_limit_s, plan.kind)
        prompts, outputs = self.lengths.draw(len(due), self._rng)
        for at, sent, prompt, output in zip(due, self._dispatch(due), prompts, outputs, strict=True):
            run.arrive(float(at), float(sent), int(prompt), int(output))

        def watch(at_s: float) -> bool:
            if at_s >= plan.duration_s or plan.early_end is None:
                return False
            return plan.early_end([row for row in run.rows if row.due_s <= at_s], at_s)

        end_s = run.until_drained(plan.duration_s, watch)
        return self._probe(
            run,
            plan.kind,
            end_s,
            end_s < plan.duration_s,
            rate=plan.rate,
            cv=plan.cv,
            warm_cut_s=plan.warm_cut_s,
        )

    async def closed_loop(self, plan: ClosedLoopPlan) -> Probe:
        run = _Run(self, plan.drain_limit_s, plan.kind)
        concurrency, num_sent, is_over = 0, 0, False

        def send(at_s: float) -> None:
            nonlocal num_sent
            if is_over or at_s >= plan.duration_s or num_sent == (plan.max_requests or math.inf):
                return
            num_sent += 1
            prompts, outputs = self.lengths.draw(1, self._rng)
            run.arrive(at_s, at_s, int(prompts[0]), int(outputs[0]))

        def grow(to: int, at_s: float) -> None:
            nonlocal concurrency
            for _ in range(concurrency, to):
                send(at_s)
            concurrency = max(concurrency, to)

        def watch(at_s: float) -> bool:
            nonlocal is_over
            if at_s >= plan.duration_s or plan.next_concurrency is None:
                return False
            wanted = plan.next_concurrency(run.rows, at_s)
            if wanted is None:
                is_over = True
            else:
                grow(wanted, at_s)
            return is_over

        run.on_end = send
        grow(plan.concurrency, 0.0)
        end_s = run.until_drained(plan.duration_s, watch)
        if plan.max_requests is not None:
            end_s = min(end_s, run.at_s)
        return self._probe(run, plan.kind, end_s, False, concurrency=concurrency)

    def _dispatch(self, due: Floats) -> Iterator[float]:
        free_at = 0.0
        for at in due:
            free_at = max(float(at), free_at) + self.faults.client_cost_s
            yield free_at

    def _probe(
        self,
        run: _Run,
        kind: str,
        end_s: float,
        ended_early: bool,
        *,
        rate: float | None = None,
        cv: float | None = None,
        concurrency: int | None = None,
        warm_cut_s: float = 0.0,
    ) -> Probe:
        begin_s = self._now_s
        self._now_s += run.at_s
        rows = [row for row in run.rows if row.due_s < end_s and (row.sent_s or 0.0) <= run.at_s]
        if self.faults.lost_records:
            rows = [row for row in rows if self._rng.random() >= self.faults.lost_records]
        if not self.faults.tells_lengths:
            for row in rows:
                row.num_output_tokens = row.num_prompt_tokens = None
        return Probe(
            kind=kind,  # type: ignore[arg-type]
            rate=rate,
            cv=cv,
            concurrency=concurrency,
            begin_s=begin_s,
            warm_cut_s=warm_cut_s,
            end_s=end_s,
            drained_s=run.at_s,
            ended_early=ended_early,
            requests=rows,
            in_flight=run.in_flight,
            samples=run.samples,
        )


class _Run:
    """One probe's events. Requests are numbered by the order in which they were given."""

    def __init__(self, prober: SimulatedProber, drain_limit_s: float, kind: str) -> None:
        self._faults = prober.faults
        self._begin_s = prober.now_s()
        kinds = self._faults.failing_kinds
        self._failing = self._faults.failing if not kinds or kind in kinds else 0.0
        self._rng = prober._rng
        self._model: BatchingModel[int] = BatchingModel(prober.parameters)
        self._drain_limit_s = drain_limit_s
        self._arrivals: list[tuple[float, int]] = []
        self._num_in_flight = 0
        self.rows: list[ProbedRequest] = []
        self.in_flight: list[tuple[float, int]] = []
        self.samples: list[ServerSample] = []
        self.at_s = 0.0
        self.on_end: Callable[[float], None] = lambda at_s: None

    def arrive(self, due_s: float, sent_s: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        row = ProbedRequest(
            due_s=due_s,
            sent_s=sent_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )
        heapq.heappush(self._arrivals, (sent_s, len(self.rows)))
        self.rows.append(row)

    def until_drained(self, duration_s: float, watch: Callable[[float], bool]) -> float:
        """Runs until all that was sent has ended. Seconds at which arrivals ended."""
        next_watch_s, next_count_s = WATCH_INTERVAL_S, IN_FLIGHT_INTERVAL_S
        end_s = duration_s
        while True:
            self._submit_arrived(end_s)
            step = self._model.next_step()
            if step is None:
                if not self._arrivals:
                    break
                step_end_s = self._arrivals[0][0]
            else:
                step_end_s = self.at_s + step.duration_s
            while next_count_s <= step_end_s and next_count_s < end_s:
                self.in_flight.append((next_count_s, self._in_flight_at(next_count_s)))
                next_count_s += IN_FLIGHT_INTERVAL_S
            self.at_s = step_end_s
            if step is not None:
                for key in step.first:
                    self.rows[key].first_token_s = self.at_s
                for key in step.finished:
                    self.rows[key].end_s = self.at_s
                    self._num_in_flight -= 1
                    if self.at_s < end_s:
                        self.on_end(self.at_s)
            if self.at_s >= next_watch_s:
                self._sample()
                next_watch_s += WATCH_INTERVAL_S
                if self.at_s < end_s and watch(self.at_s):
                    self._cut_off()
                    return self.at_s
            if self.at_s > end_s + self._drain_limit_s:
                self._cut_off()
                break
        return end_s

    def _in_flight_at(self, at_s: float) -> int:
        # Those that arrive while the step goes on are not submitted yet.
        return self._num_in_flight + sum(1 for sent_s, _ in self._arrivals[:64] if sent_s <= at_s)

    def _submit_arrived(self, end_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.at_s:
            _, key = heapq.heappop(self._arrivals)
            row = self.rows[key]
            assert row.num_prompt_tokens is not None
            assert row.num_output_tokens is not None
            if self._is_refused():
                row.failed, row.end_s, row.error = True, self.at_s, self._faults.error
                self.on_end(self.at_s + PAUSE_AFTER_FAILURE_S)
                continue
            self._model.submit(key, row.num_prompt_tokens, row.num_output_tokens)
            self._num_in_flight += 1

    def _is_refused(self) -> bool:
        if not self._failing or self._begin_s + self.at_s < self._faults.fails_after_s:
            return False
        return bool(self._rng.random() < self._failing)

    def _cut_off(self) -> None:
        for row in self.rows:
            if row.end_s is None and row.sent_s is not None:
                row.cut_off, row.end_s = True, self.at_s

    def _sample(self) -> None:
        model = self._model
        self.samples.append(
            ServerSample(
                at_s=self.at_s,
                running=float(model.num_running),
                waiting=float(model.num_waiting),
                generation_tokens=float(model.num_generation_tokens),
                prompt_tokens=float(model.num_prompt_tokens),
                prefix_queries=float(model.num_prompt_tokens),
                prefix_hits=model.num_prompt_tokens * self._faults.hit_share,
                preemptions=float(model.num_preemptions),
                throttled=model.num_prompt_tokens * self._faults.throttled,
            )
        )


def arrival_times_s(rate: float, cv: float, duration_s: float, rng: np.random.Generator) -> Floats:
    """As the live generator draws them."""
    offsets_ns = arrival_offsets_within_ns(duration_s, rate, burstiness_of_cv(cv), rng)
    return np.array(offsets_ns, dtype=np.float64) / NANOSECONDS_PER_SECOND


def _lognormal(mean: float, cv: float, size: int | tuple[int, ...], rng: np.random.Generator) -> Floats:
    variance = math.log(1 + cv**2)
    drawn = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), size)
    return np.maximum(1.0, np.round(drawn))
