"""Probes of a real server, over HTTP, on the real clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypedDict

import aiohttp
import numpy as np

from loadtest.arrivals import NANOSECONDS_PER_SECOND, arrival_offsets_within_ns, burstiness_of_cv
from loadtest.client import OpenAIClient, Target
from loadtest.datasets.prompt import Item, Prompt
from loadtest.generator import OpenLoop, garbage_collection_held, generate_load
from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.knee.prober import ClientCheck, ClosedLoopPlan, OpenLoopPlan
from loadtest.options import BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.server_metrics import ServerMetrics, ServerSample, ServerSampler, not_reported
from loadtest.workload import build_workload

WATCH_INTERVAL_S = 1.0
IN_FLIGHT_INTERVAL_S = 0.25
RECENT_S = 15.0
CHECK_MIN_RATE = 30.0  # a 99th percentile needs some requests
CHECK_TIMEOUT_S = 2.0
FIRST_PROMPTS = 256  # of a closed loop, made before it begins
MORE_PROMPTS = 32
STREAM_KNEE = 4  # of random numbers, beside those of serve.py


@dataclass(frozen=True, slots=True)
class LiveTarget:
    """What to load, and with what."""

    options: BenchServeOptions  # of the data set, the URL and the metrics page
    target: Target
    nonce: int


class LiveProber:
    """Used as `async with`, which opens the connections. One probe at a time."""

    def __init__(self, live: LiveTarget) -> None:
        self._live = live
        self._begin_s = time.monotonic()
        self._num_probes = 0
        self._rng = np.random.default_rng([live.options.seed, live.nonce, STREAM_KNEE])
        self._held = contextlib.AsyncExitStack()
        self._in_flight = 0
        self._all_samples: list[ServerSample] = []
        self._has_usage = True

    async def __aenter__(self) -> Self:
        self._client = await self._held.enter_async_context(OpenAIClient(self._live.target))
        self._metrics = await self._held.enter_async_context(
            ServerMetrics(self._live.options.metrics_page, self._live.target.headers)
        )
        self._begin_s = time.monotonic()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held.aclose()

    @property
    def not_reported(self) -> list[str]:
        """Names of server figures; `usage` for token counts of answers."""
        missing = not_reported(self._all_samples)
        return missing if self._has_usage else ["usage", *missing]

    def now_s(self) -> float:
        return time.monotonic() - self._begin_s

    async def check_client(self, rate: float, duration_s: float) -> ClientCheck:
        """Against the health page: what the generator does for a request, without the server's work."""
        url = self._live.options.metrics_page.removesuffix("/metrics") + "/health"
        rate = max(rate, CHECK_MIN_RATE)
        offsets_ns = arrival_offsets_within_ns(duration_s, rate, burstiness_of_cv(1.0), self._rng)
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, trust_env=False
        ) as session:
            num_refused = 0

            async def ask(prompt: Prompt, record: RequestRecord) -> None:
                nonlocal num_refused
                record.t_sent_ns = time.monotonic_ns()
                # Whatever it answers, and however late: only when it was asked counts.
                try:
                    async with session.get(url) as response:
                        await response.read()
                except TimeoutError:
                    pass
                except (aiohttp.ClientError, OSError):
                    num_refused += 1
                record.t_end_ns = time.monotonic_ns()

            run = await generate_load([Prompt("", 1)] * len(offsets_ns), OpenLoop(offsets_ns), ask)
        sent_ns = [record.t_sent_ns for record in run.records if record.t_sent_ns is not None]
        lags_ns = [record.dispatch_lag_ns for record in run.records if record.dispatch_lag_ns is not None]
        in_time = sum(
            at_ns - run.t_start_ns <= (duration_s + 0.1) * NANOSECONDS_PER_SECOND for at_ns in sent_ns
        )
        lag_ns = float(np.percentile(lags_ns, 99)) if lags_ns else 0.0
        refused_share = num_refused / max(len(run.records), 1)
        return ClientCheck(rate, in_time / duration_s, lag_ns / NANOSECONDS_PER_SECOND, refused_share)

    async def open_loop(self, plan: OpenLoopPlan) -> Probe:
        offsets_ns = arrival_offsets_within_ns(
            plan.duration_s, plan.rate, burstiness_of_cv(plan.cv), self._rng
        )
        prompts = self._prompts(len(offsets_ns))
        begin_s = self.now_s()
        async with self._watched() as seen:
            t_start_ns = time.monotonic_ns()
            load = asyncio.ensure_future(
                generate_load(
                    prompts, OpenLoop(offsets_ns), self._send, t_start_ns=t_start_ns, records=seen.records
                )
            )
            end_s, ended_early, next_watch_s = plan.duration_s, False, WATCH_INTERVAL_S
            async for at_s in _ticks(t_start_ns, load, until_s=plan.duration_s + plan.drain_limit_s):
                if at_s < plan.duration_s:
                    seen.count(at_s, self._in_flight)
                if plan.early_end is not None and next_watch_s <= at_s < plan.duration_s:
                    next_watch_s = at_s + WATCH_INTERVAL_S
                    if plan.early_end(seen.rows(t_start_ns, since_s=at_s - RECENT_S), at_s):
                        end_s, ended_early = at_s, True
                        break
            await _give_up(load)
        return Probe(
            kind=plan.kind,
            rate=plan.rate,
            cv=plan.cv,
            begin_s=begin_s,
            warm_cut_s=plan.warm_cut_s,
            end_s=end_s,
            drained_s=_seconds_since(t_start_ns),
            ended_early=ended_early,
            **self._seen(seen, t_start_ns),
        )

    async def closed_loop(self, plan: ClosedLoopPlan) -> Probe:
        prompts = self._endless_prompts(plan.max_requests or FIRST_PROMPTS)
        num_left = plan.max_requests
        begin_s = self.now_s()
        async with self._watched() as seen:
            t_start_ns = time.monotonic_ns()
            is_over = False

            async def client() -> None:
                nonlocal num_left
                while not is_over and num_left != 0:
                    num_left = None if num_left is None else num_left - 1
                    prompt = next(prompts)
                    now_ns = time.monotonic_ns()
                    record = RequestRecord(
                        len(seen.records),
                        prompt.num_output_tokens,
                        now_ns,
                        t_dispatch_ns=now_ns,
                        t_ready_ns=now_ns,
                    )
                    seen.records.append(record)
                    await self._send(prompt, record)
                    if (
                        not record.succeeded
                    ):  # a server that refuses at once must not be asked in a tight loop
                        await asyncio.sleep(IN_FLIGHT_INTERVAL_S)

            clients = [asyncio.create_task(client()) for _ in range(plan.concurrency)]
            everything = asyncio.ensure_future(_all_of(clients))
            end_s, next_watch_s = plan.duration_s, WATCH_INTERVAL_S
            with garbage_collection_held():
                async for at_s in _ticks(t_start_ns, everything, until_s=plan.duration_s):
                    seen.count(at_s, self._in_flight)
                    if plan.next_concurrency is None or at_s < next_watch_s:
                        continue
                    next_watch_s = at_s + WATCH_INTERVAL_S
                    wanted = plan.next_concurrency(seen.rows(t_start_ns), at_s)
                    if wanted is None:
                        end_s = at_s
                        break
                    clients += [asyncio.create_task(client()) for _ in range(len(clients), wanted)]
                is_over = True
                end_s = min(end_s, _seconds_since(t_start_ns))
                async for _ in _ticks(t_start_ns, everything, until_s=end_s + plan.drain_limit_s):
                    pass
            await _give_up(everything, *clients)
        return Probe(
            kind=plan.kind,
            concurrency=len(clients),
            begin_s=begin_s,
            end_s=end_s,
            drained_s=_seconds_since(t_start_ns),
            **self._seen(seen, t_start_ns),
        )

    async def _send(self, prompt: Prompt, record: RequestRecord) -> None:
        self._in_flight += 1
        try:
            await self._client.send(prompt, record)
        finally:
            self._in_flight -= 1

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[_Seen]:
        """What a probe sees; the server is sampled meanwhile."""
        async with ServerSampler(self._metrics).running() as samples:
            yield _Seen(samples, ignores_eos=self._live.target.ignore_eos)

    def _seen(self, seen: _Seen, t_start_ns: int) -> _SeenFields:
        self._all_samples += seen.samples
        rows = seen.rows(t_start_ns, has_ended=True)
        if any(row.num_output_tokens is None and not row.failed and not row.cut_off for row in rows):
            self._has_usage = False
        start_s = t_start_ns / NANOSECONDS_PER_SECOND
        return {
            "requests": rows,
            "in_flight": seen.counts,
            "samples": [sample.from_beginning(start_s) for sample in seen.samples],
        }

    def _prompts(self, count: int) -> list[Item]:
        """Other texts and other lengths in each probe: neither cache nor luck is carried over."""
        self._num_probes += 1
        options = replace(self._live.options, seed=self._live.options.seed + self._num_probes)
        nonce = (self._live.nonce, self._num_probes, STREAM_KNEE)
        return build_workload(options, count, nonce).items if count else []

    def _endless_prompts(self, first: int) -> Iterator[Prompt]:
        batch = self._prompts(first)
        while True:
            for item in batch:
                assert isinstance(item, Prompt), "check_workload() refuses conversations"
                yield item
            batch = self._prompts(MORE_PROMPTS)


class _SeenFields(TypedDict):
    requests: list[ProbedRequest]
    in_flight: list[tuple[float, int]]
    samples: list[ServerSample]


class _Seen:
    """What grows while a probe runs."""

    def __init__(self, samples: list[ServerSample], *, ignores_eos: bool) -> None:
        self.records: list[RequestRecord] = []
        self.counts: list[tuple[float, int]] = []
        self.samples = samples
        self._ignores_eos = ignores_eos

    def count(self, at_s: float, in_flight: int) -> None:
        self.counts.append((at_s, in_flight))

    def rows(self, t_start_ns: int, since_s: float = 0.0, *, has_ended: bool = False) -> list[ProbedRequest]:
        """`has_ended`: the probe has, so what has no end is cut off."""
        since_ns = t_start_ns + int(since_s * NANOSECONDS_PER_SECOND)
        now_ns = time.monotonic_ns()
        return [
            self._row(record, t_start_ns, now_ns if has_ended else None)
            for record in self.records
            if record.t_due_ns >= since_ns
        ]

    def _row(self, record: RequestRecord, t_start_ns: int, cut_off_ns: int | None) -> ProbedRequest:
        def seconds(at_ns: int | None) -> float | None:
            return None if at_ns is None else (at_ns - t_start_ns) / NANOSECONDS_PER_SECOND

        due_s, lag_ns = seconds(record.t_due_ns), record.generator_lag_ns
        assert due_s is not None
        cut_off = record.t_end_ns is None and cut_off_ns is not None
        num_output_tokens = record.num_output_tokens
        if cut_off and num_output_tokens is None and self._ignores_eos:
            num_output_tokens = record.num_output_tokens_asked  # it would have been made to be as long
        return ProbedRequest(
            due_s=due_s,
            sent_s=seconds(record.t_sent_ns),
            first_token_s=seconds(record.t_first_token_ns) if record.is_streamed else None,
            end_s=seconds(cut_off_ns if cut_off else record.t_end_ns),
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            failed=record.failure is not None,
            cut_off=cut_off,
            error=record.error,
            trace_id=record.trace_id,
            generator_lag_s=None if lag_ns is None else lag_ns / NANOSECONDS_PER_SECOND,
            request_class=record.tenant,
        )


async def _ticks(t_start_ns: int, load: asyncio.Future[Any], until_s: float) -> AsyncIterator[float]:
    """The seconds since the start, four times a second, until the load has ended or the time is over."""
    while not load.done():
        left_s = until_s - _seconds_since(t_start_ns)
        if left_s <= 0:
            return
        await asyncio.wait({load}, timeout=min(IN_FLIGHT_INTERVAL_S, left_s))
        if not load.done():
            yield _seconds_since(t_start_ns)


async def _give_up(*tasks: asyncio.Future[Any]) -> None:
    """Ends what has not ended. A bug of ours in one that has is raised."""
    for task in tasks:
        if not task.done():
            task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _all_of(tasks: list[asyncio.Task[None]]) -> None:
    """Of a list that may grow meanwhile."""
    while pending := [task for task in tasks if not task.done()]:
        await asyncio.wait(pending)


def _seconds_since(t_start_ns: int) -> float:
    return (time.monotonic_ns() - t_start_ns) / NANOSECONDS_PER_SECOND
