"""Puts requests on the server: closed loop or open loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from loadtest.arrivals import NANOSECONDS_PER_SECOND
from loadtest.datasets.prompt import Conversation, Item, Prompt, Role
from loadtest.generator_samples import GeneratorSamples, generator_sampling
from loadtest.precise_timer import PreciseTimer
from loadtest.request_record import RequestRecord

Send = Callable[[Prompt, RequestRecord], Awaitable[None]]
ClockNs = Callable[[], int]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when the last one has ended.

    A request is due when a client takes it up: a closed loop has no schedule to be late for, and
    so never shows overload. A client plays a conversation to its end, thinking included.
    """

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are due at times that do not depend on the server. The schedule is never moved.

    With `max_concurrency`, what is due waits in the generator for a free slot; that wait is visible
    as sent - due. Of a conversation the first turn is due then, the others when they can be.
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
    generator: list[GeneratorSamples] = field(default_factory=list)  # one for each process

    @property
    def duration_s(self) -> float:
        return (self.t_end_ns - self.t_start_ns) / NANOSECONDS_PER_SECOND


async def generate_load(
    prompts: Sequence[Item],
    schedule: Schedule,
    send: Send,
    clock_ns: ClockNs = time.monotonic_ns,
    *,
    t_start_ns: int | None = None,
    indices: Sequence[int] | None = None,
    records: list[RequestRecord] | None = None,
) -> LoadRun:
    """Sends every prompt once and waits for all the answers.

    Cancelled, it gives up what is under way and sends nothing more.

    `t_start_ns`: when the run begins, so that several processes can begin together; None: now.
    `indices`: of the records, the first one for a conversation, whose turns follow it; None: counted.
    `records`: where they appear as requests are taken up, for a caller who looks on, or will cancel.
    """
    with garbage_collection_held(), generator_sampling(clock_ns) as samples:
        if t_start_ns is None:
            t_start_ns = clock_ns()
        else:
            await _until(t_start_ns, clock_ns)
        started_at = datetime.now().astimezone()
        run = _Run(send, clock_ns, first_indices(prompts) if indices is None else indices, records)
        match schedule:
            case ClosedLoop(concurrency):
                await run.closed_loop(prompts, concurrency)
            case OpenLoop():
                await run.open_loop(prompts, schedule, t_start_ns)
        t_end_ns = clock_ns()
    in_order = sorted(run.records, key=lambda record: record.index)
    return LoadRun(in_order, t_start_ns, t_end_ns, started_at, [samples])


def first_indices(prompts: Sequence[Item]) -> list[int]:
    """Of the record of each prompt, or of the first turn of each conversation."""
    sizes = (len(item.turns) if isinstance(item, Conversation) else 1 for item in prompts)
    return list(itertools.accumulate(sizes, initial=0))[:-1]


@contextlib.contextmanager
def garbage_collection_held() -> Iterator[None]:
    """No collection pauses the clock. What is there is frozen, so that one that somebody asks for is short.

    Not collected before: in a big process that takes a second, and what was garbage stays it until after.
    """
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class _Run:
    """What the requests of one run share."""

    def __init__(
        self, send: Send, clock_ns: ClockNs, indices: Sequence[int], records: list[RequestRecord] | None
    ) -> None:
        self._send = send
        self._clock_ns = clock_ns
        self._indices = indices
        self._slots: asyncio.Semaphore | None = None
        self.records: list[RequestRecord] = [] if records is None else records

    async def closed_loop(self, prompts: Sequence[Item], concurrency: int) -> None:
        waiting = iter(enumerate(prompts))  # shared by all clients

        async def client() -> None:
            for index, item in waiting:
                await self._play(index, item, self._clock_ns())

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(prompts))):
                clients.create_task(client())

    async def open_loop(self, prompts: Sequence[Item], schedule: OpenLoop, t_start_ns: int) -> None:
        if schedule.max_concurrency is not None:
            self._slots = asyncio.Semaphore(schedule.max_concurrency)
        timer = PreciseTimer(self._clock_ns)
        try:
            async with asyncio.TaskGroup() as requests:
                for index, (item, offset_ns) in enumerate(zip(prompts, schedule.offsets_ns, strict=True)):
                    # Against the absolute time, not the last request: lateness must not add up.
                    t_due_ns = t_start_ns + offset_ns
                    if t_due_ns > self._clock_ns():
                        await timer.wait_until(t_due_ns)
                    requests.create_task(self._play(index, item, t_due_ns))
        finally:
            timer.close()

    async def _play(self, index: int, item: Item, t_due_ns: int) -> None:
        if isinstance(item, Prompt):
            await self._one(self._indices[index], item, t_due_ns)
            return
        history: tuple[tuple[Role, str], ...] = ()
        for number, turn in enumerate(item.turns):
            if number:
                t_due_ns = self._clock_ns() + int(turn.think_time_s * NANOSECONDS_PER_SECOND)
                await _until(t_due_ns, self._clock_ns)
            prompt = item.prompt(number, history, index)
            record = await self._one(self._indices[index] + number, prompt, t_due_ns)
            if not record.succeeded:
                return  # nobody talks on to a server that has not answered
            history = item.extended(history, number, record.text)

    async def _one(self, index: int, prompt: Prompt, t_due_ns: int) -> RequestRecord:
        now_ns = self._clock_ns()
        record = RequestRecord(
            index,
            prompt.num_output_tokens,
            t_due_ns,
            t_dispatch_ns=now_ns,
            t_ready_ns=now_ns,
            tenant=prompt.tenant,
            conversation=prompt.conversation,
            turn=prompt.turn,
        )
        self.records.append(record)
        if self._slots is None:
            await self._send(prompt, record)
        else:
            async with self._slots:
                record.t_ready_ns = self._clock_ns()
                await self._send(prompt, record)
        return record


async def _until(t_ns: int, clock_ns: ClockNs) -> None:
    """Never wakes before: timers of event loops are rounded to milliseconds, and some are rounded down."""
    while (wait_ns := t_ns - clock_ns()) > 0:  # noqa: ASYNC110 - there is no event but the time
        await asyncio.sleep(wait_ns / NANOSECONDS_PER_SECOND)
