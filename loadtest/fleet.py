"""Several processes that make one load: each has an event loop and a share of the schedule of its own.

They begin at one instant of CLOCK_MONOTONIC, which is one clock for all processes of a machine, so their
records can be put together as they are. A worker that dies takes the run with it: what it should have
sent is missing, and figures without it would be of a lighter load.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import msgspec

from loadtest.client import Target
from loadtest.datasets.prompt import Conversation, Item, Prompt
from loadtest.generator import ClosedLoop, LoadRun, OpenLoop, Schedule, first_indices
from loadtest.generator_samples import GeneratorSamples
from loadtest.request_record import RequestRecord

START_DELAY_NS = 100_000_000  # from "all are ready" to the start, so that the word has reached all
LENGTH_BYTES = 8


class Job(msgspec.Struct):
    """What one worker has to do. The target's headers hold keys, so this goes through a pipe."""

    target: Target
    items: list[Prompt | Conversation]
    indices: list[int]
    offsets_ns: list[int] | None  # None: a closed loop
    concurrency: int | None

    @property
    def schedule(self) -> Schedule:
        if self.offsets_ns is not None:
            return OpenLoop(self.offsets_ns, self.concurrency)
        assert self.concurrency is not None, "a closed loop has a concurrency"
        return ClosedLoop(self.concurrency)


class Start(msgspec.Struct):
    t_start_ns: int


class Done(msgspec.Struct):
    records: list[RequestRecord]
    t_end_ns: int
    samples: GeneratorSamples


class WorkerDied(Exception):  # noqa: N818 - reads as the thing that is raised
    """A process of the generator has ended before its share of the load."""


class Fleet:
    """Starts the workers, gives them runs one after another, ends them with its context."""

    def __init__(self, target: Target, num_workers: int) -> None:
        self._target = target
        self._num_workers = num_workers
        self._workers: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        for _ in range(self._num_workers):
            self._workers.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "loadtest.worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()  # they own nothing that needs an orderly end
        await asyncio.gather(*(worker.wait() for worker in self._workers))
        self._workers.clear()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def generate_load(self, items: Sequence[Item], schedule: Schedule) -> LoadRun:
        """As `generator.generate_load`. Items go to the workers in turn, so that each has a thinned-out
        copy of the whole schedule; a concurrency is divided. Raises WorkerDied."""
        jobs = deal(self._target, items, schedule, len(self._workers))
        workers = self._workers[: len(jobs)]
        for worker, job in zip(workers, jobs, strict=True):
            await self._tell(worker, job)
        for worker in workers:
            await self._hear(worker)  # ready
        t_start_ns = time.monotonic_ns() + START_DELAY_NS
        started_at = datetime.now().astimezone()
        for worker in workers:
            await self._tell(worker, Start(t_start_ns))
        hearing = [asyncio.ensure_future(self._hear(worker)) for worker in workers]
        try:
            frames = await asyncio.gather(*hearing)
        finally:
            for one in hearing:
                one.cancel()
        shares = [msgspec.msgpack.decode(frame, type=Done) for frame in frames]
        for number, share in enumerate(shares):
            share.samples.worker = number
        records = sorted((one for share in shares for one in share.records), key=lambda one: one.index)
        return LoadRun(
            records,
            t_start_ns,
            max(share.t_end_ns for share in shares),
            started_at,
            [share.samples for share in shares],
        )

    async def _tell(self, worker: asyncio.subprocess.Process, message: Any) -> None:
        frame = msgspec.msgpack.encode(message)
        assert worker.stdin is not None, "workers are started with a pipe"
        try:
            worker.stdin.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
            await worker.stdin.drain()
        except ConnectionError as error:
            raise await self._death_of(worker) from error

    async def _hear(self, worker: asyncio.subprocess.Process) -> bytes:
        assert worker.stdout is not None, "workers are started with a pipe"
        try:
            length = await worker.stdout.readexactly(LENGTH_BYTES)
            return await worker.stdout.readexactly(int.from_bytes(length, "little"))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._death_of(worker) from error

    async def _death_of(self, worker: asyncio.subprocess.Process) -> WorkerDied:
        code = await worker.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        number = self._workers.index(worker) + 1
        return WorkerDied(
            f"process {number} of {len(self._workers)} of the load generator ended with {how}; "
            "this run has no result"
        )


def num_shares(items: Sequence[Item], schedule: Schedule, num_workers: int) -> int:
    """How many processes get anything to do: no more than items or concurrent requests."""
    concurrency = schedule.concurrency if isinstance(schedule, ClosedLoop) else schedule.max_concurrency
    return max(1, min(num_workers, len(items), concurrency or num_workers))


def deal(target: Target, items: Sequence[Item], schedule: Schedule, num_workers: int) -> list[Job]:
    """The share of each worker: every n-th item. No more workers than items or concurrent requests."""
    concurrency = schedule.concurrency if isinstance(schedule, ClosedLoop) else schedule.max_concurrency
    num_jobs = num_shares(items, schedule, num_workers)
    indices = first_indices(items)
    jobs = []
    for number in range(num_jobs):
        share = None if concurrency is None else len(range(number, concurrency, num_jobs))
        jobs.append(
            Job(
                target,
                list(items[number::num_jobs]),
                indices[number::num_jobs],
                list(schedule.offsets_ns[number::num_jobs]) if isinstance(schedule, OpenLoop) else None,
                share,
            )
        )
    return jobs
