"""What a step costs beside the model: planning it, taking its result in, reporting the load.

    python -m tests.benchmarks.step_overhead

The runner returns the same token for every row and does nothing else. Prints the median of a step for growing
numbers of running sequences, with and without a queue, and what one more sequence adds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from engine_service.block_pool import BlockPool
from engine_service.engine import Engine
from engine_service.fair_share import FairShare
from engine_service.runner import RowResults, Sampled
from engine_service.scheduler import Scheduler
from engine_service.sequence import StepPlan
from engine_service.step_execution import StepExecution
from shared.identifiers import RequestId, TenantId
from shared.messages import Submit
from shared.sampling import SamplingParams

NUM_BLOCKS = 40_000
PROMPT_TOKENS = 64
NUM_STEPS = 200
CASES = ((1, 0), (64, 0), (128, 0), (256, 0), (512, 0), (64, 1000))  # running, waiting


_SAMPLED = Sampled(7)


class IdleRunner:
    """Computes nothing."""

    num_blocks = NUM_BLOCKS

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def execute(self, step: StepPlan, await_history: Callable[[], None] = lambda: None) -> RowResults:
        await_history()
        return RowResults([_SAMPLED if row.samples else None for row in step.rows])


def make_engine(
    num_running: int,
    num_waiting: int,
    *,
    runner: IdleRunner | None = None,
    execution: StepExecution | None = None,
) -> Engine:
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, 16),
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        max_queued_requests=10_000,
        policy=FairShare(),
    )
    engine = Engine(scheduler, runner or IdleRunner(), vocab_size=1000, execution=execution)
    for number in range(num_running + num_waiting):
        prompt = [number % 1000] * PROMPT_TOKENS
        sampling = SamplingParams(max_tokens=1900, seed=number)
        engine.add(Submit(RequestId(str(number)), prompt, sampling, TenantId(f"tenant {number % 7}")))
    while engine.load().num_running < num_running:
        engine.step()
    for _ in range(20):
        engine.step()
    return engine


def median_step_us(engine: Engine) -> float:
    times = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        engine.step()
        engine.load()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    print("| running | waiting | median step, µs | µs per running sequence |")
    print("|---:|---:|---:|---:|")
    for num_running, num_waiting in CASES:
        step_us = median_step_us(make_engine(num_running, num_waiting))
        print(f"| {num_running} | {num_waiting} | {step_us:.0f} | {step_us / num_running:.2f} |")


if __name__ == "__main__":
    main()
