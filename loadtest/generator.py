"""Puts requests on the server: closed loop or open loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from loadtest.arrivals import NANOSECONDS_PER_SECOND
from loadtest.request_record import RequestRecord
from loadtest.workload import Prompt

Send = Callable[[Prompt, RequestRecord], Awaitable[None]]
ClockNs = Callable[[], int]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when the last one has ended.

    A request is due when a client takes it up: a closed loop has no schedule to be late for, and
    so never shows overload.
    """

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are due at times that do not depend on the server. The schedule is never moved.

    With `max_concurrency`, what is due waits in the generator for a free slot; that wait is visible
    as sent - due.
    """

    offsets_ns: Sequence[int]
    max_concurrency: int | None = None


Schedule = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run, all of it: every request that was due has a record, in the order of the prompts."""

    records: list[RequestRecord]
    t_start_ns: int
    t_end_ns: int  # after the last answer
    started_at: datetime  # wall clock at t_start_ns

    @property
    def duration_s(self) -> float:
        return (self.t_end_ns - self.t_start_ns) / NANOSECONDS_PER_SECOND


async def generate_load(
    prompts: Sequence[Prompt], schedule: Schedule, send: Send, clock_ns: ClockNs = time.monotonic_ns
) -> LoadRun:
    """Sends every prompt once and waits for all the answers."""
    with garbage_collection_held():
        started_at = datetime.now().astimezone()
        t_start_ns = clock_ns()
        match schedule:
            case ClosedLoop(concurrency):
                records = await _closed_loop(prompts, concurrency, send, clock_ns)
            case OpenLoop():
                records = await _open_loop(prompts, schedule, t_start_ns, send, clock_ns)
        return LoadRun(records, t_start_ns, clock_ns(), started_at)


@contextlib.contextmanager
def garbage_collection_held() -> Iterator[None]:
    """No collection pauses the clock. What is there is frozen first, so that later collections are short."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


async def _closed_loop(
    prompts: Sequence[Prompt], concurrency: int, send: Send, clock_ns: ClockNs
) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    waiting = iter(prompts)  # shared by all clients

    async def client() -> None:
        for prompt in waiting:
            record = RequestRecord(len(records), prompt.num_output_tokens, clock_ns())
            records.append(record)
            await send(prompt, record)

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(prompts))):
            clients.create_task(client())
    return records


async def _open_loop(
    prompts: Sequence[Prompt], schedule: OpenLoop, t_start_ns: int, send: Send, clock_ns: ClockNs
) -> list[RequestRecord]:
    records = [
        RequestRecord(index, prompt.num_output_tokens, t_start_ns + offset_ns)
        for index, (prompt, offset_ns) in enumerate(zip(prompts, schedule.offsets_ns, strict=True))
    ]
    limit = schedule.max_concurrency
    slots = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)

    async def one(prompt: Prompt, record: RequestRecord) -> None:
        async with slots:
            await send(prompt, record)

    async with asyncio.TaskGroup() as requests:
        for prompt, record in zip(prompts, records, strict=True):
            # Against the absolute time, not the last request: lateness must not add up.
            wait_ns = record.t_due_ns - clock_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / NANOSECONDS_PER_SECOND)
            requests.create_task(one(prompt, record))
    return records
