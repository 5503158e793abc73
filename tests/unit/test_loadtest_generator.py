"""Closed and open loop on a clock that the test moves."""

from __future__ import annotations

import asyncio
import gc

from loadtest.datasets.prompt import Prompt
from loadtest.generator import ClosedLoop, OpenLoop, generate_load
from loadtest.request_record import RequestRecord

PROMPTS = [Prompt([1000 + index], 1) for index in range(12)]


class InstantServer:
    """Answers after a few turns of the event loop; counts what runs at once."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self.order: list[int] = []
        self.saw_gc_enabled = False

    async def send(self, prompt: Prompt, record: RequestRecord) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.order.append(prompt.content[0])
        self.saw_gc_enabled |= gc.isenabled()
        for _ in range(3 + record.index % 4):
            await asyncio.sleep(0)
        self.running -= 1


async def test_closed_loop_keeps_exactly_its_concurrency_busy_and_sends_each_prompt_once() -> None:
    server = InstantServer()
    run = await generate_load(PROMPTS, ClosedLoop(4), server.send)
    assert server.most_running == 4
    assert server.order == [prompt.content[0] for prompt in PROMPTS]
    assert [record.index for record in run.records] == list(range(12))


async def test_closed_loop_with_more_clients_than_prompts_sends_no_more_than_there_are() -> None:
    server = InstantServer()
    run = await generate_load(PROMPTS[:2], ClosedLoop(50), server.send)
    assert len(run.records) == 2


async def test_open_loop_does_not_wait_for_answers_and_keeps_the_due_times() -> None:
    server = InstantServer()
    offsets = [index * 1000 for index in range(12)]
    run = await generate_load(PROMPTS, OpenLoop([0] * 12), server.send)
    assert server.most_running == 12
    run = await generate_load(PROMPTS, OpenLoop(offsets), server.send)
    assert [record.t_due_ns - run.t_start_ns for record in run.records] == offsets


async def test_capped_open_loop_never_exceeds_its_limit() -> None:
    server = InstantServer()
    run = await generate_load(PROMPTS, OpenLoop([0] * 12, max_concurrency=3), server.send)
    assert server.most_running == 3
    assert {record.t_due_ns for record in run.records} == {run.t_start_ns}


async def test_garbage_collection_is_off_during_the_run_and_back_afterwards() -> None:
    server = InstantServer()
    assert gc.isenabled()
    await generate_load(PROMPTS, ClosedLoop(2), server.send)
    assert not server.saw_gc_enabled
    assert gc.isenabled()
