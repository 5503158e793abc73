"""Planning a step while the one before it computes: the same tokens, and nothing that breaks for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from engine_service.compute_thread import ComputeThread
from engine_service.fake_runner import FakeModelFailure, FakeRunner, FakeStep
from engine_service.runner import RowResults
from engine_service.sequence import StepPlan
from engine_service.step_execution import ExecutionEnded, OverlappedExecution
from tests.unit.worlds import EOS, MODEL, World, expected_output, make_prompt, make_world


def outputs_of_random_trace(seed: int, *, async_scheduling: bool) -> dict[str, list[int]]:
    """Arrivals and aborts at the same places of the trace, preemption every third step, a small pool."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 5])
    world = make_world(
        num_blocks=rng.choice([60, 90]) // block_size,
        block_size=block_size,
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        max_model_len=60,
        enable_prefix_caching=rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([None, 3]),
        force_preemption_every=3,
        async_scheduling=async_scheduling,
    )
    for number in range(60):
        start = rng.choice([0, 0, 300])
        world.add(
            f"r{number}",
            make_prompt(rng.randint(1, 30), start),
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            stop_token_ids=tuple(range(rng.choice([0, 90]))),
            bad_words=((start + 5,), (rng.randrange(900), rng.randrange(900))),
            shares_prompt_with=f"r{number - 1}" if rng.random() < 0.1 else None,
        )
        if number % 7 == 6:
            aborted = f"r{rng.randrange(number)}"
            world.abort(aborted)
            world.output[aborted] = []  # how far it came depends on when its updates come
        for _ in range(rng.randint(0, 4)):
            world.step()
    world.run()
    world.assert_idle()
    return {name: tokens for name, tokens in world.output.items() if name in world.finish_order}


@pytest.mark.parametrize("seed", range(6))
def test_a_random_trace_has_the_same_tokens_with_and_without_overlap(seed: int) -> None:
    print(f"seed {seed}")
    plain = outputs_of_random_trace(seed, async_scheduling=False)
    overlapped = outputs_of_random_trace(seed, async_scheduling=True)
    both = plain.keys() & overlapped.keys()  # an abort may meet a request that has just ended, or not
    assert len(both) > 40
    assert {name: plain[name] for name in both} == {name: overlapped[name] for name in both}


class GatedRunner(FakeRunner):
    """Each step begins when the test lets it."""

    def __init__(self) -> None:
        super().__init__(64, 4, model=MODEL)
        self.prepared = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def prepare(self, plan: StepPlan) -> FakeStep:
        step = super().prepare(plan)
        self.prepared.release()
        return step

    def execute(self, step: FakeStep, await_history: Callable[[], None] = lambda: None) -> RowResults:
        assert self.may_go_on.acquire(timeout=10)
        return super().execute(step, await_history)


def test_the_next_step_is_planned_while_one_computes() -> None:
    world = make_world(async_scheduling=True)
    runner = GatedRunner()
    world.engine._runner = runner  # type: ignore[assignment]
    submit = world.add("r", make_prompt(5), max_tokens=3)
    stepping = threading.Thread(target=world.step)
    stepping.start()
    assert all(runner.prepared.acquire(timeout=10) for _ in range(2))
    assert world.sequence("r").num_computed_tokens == 6  # the prompt, and a token that nobody knows yet
    runner.may_go_on.release()
    stepping.join(10)
    assert world.output["r"] == expected_output(submit)[:1]
    for _ in range(5):
        runner.may_go_on.release()
    world.run()
    assert world.output["r"] == expected_output(submit)
    world.assert_idle()


def test_a_sequence_that_ends_leaves_its_next_row_without_effect() -> None:
    """An end-of-sequence token is known only when the step behind it is on its way."""
    world = make_world(async_scheduling=True)
    [first, second] = expected_output(world.add("probe", make_prompt(5), max_tokens=2))
    world.run()
    world.add("r", make_prompt(5), max_tokens=50, stop_token_ids=(second,))
    neighbour = world.add("neighbour", make_prompt(7, 300), max_tokens=9)
    world.run()
    assert world.output["r"] == [first, second]
    assert world.last_update["r"].finish_reason == "stop"
    assert world.output["neighbour"] == expected_output(neighbour)
    assert [row for step in world.runner.steps for row in step if row[0] == "r"][-1] == ("r", 6, 1)
    world.assert_idle()


def test_no_row_is_planned_behind_the_last_token_that_a_sequence_may_have() -> None:
    world = make_world(async_scheduling=True)
    world.add("r", make_prompt(5), max_tokens=3)
    world.run()
    assert [row for step in world.runner.steps for row in step] == [("r", 0, 5), ("r", 5, 1), ("r", 6, 1)]


def failing_world() -> World:
    world = make_world(async_scheduling=True)
    world.engine._execution = OverlappedExecution(ComputeThread())
    world.add("r", make_prompt(5), max_tokens=9)
    return world


def test_a_step_that_fails_ends_those_that_were_planned_on_top_of_it() -> None:
    world = failing_world()
    world.runner._die_at_step = 2
    world.step()
    with pytest.raises(FakeModelFailure):
        world.engine.step()
    with pytest.raises(ExecutionEnded):
        world.engine._in_flight[0].running.result()
    assert world.runner._num_steps == 2


def test_closing_ends_a_step_that_waits_for_the_history() -> None:
    world = failing_world()
    world.step()
    step = world.engine._in_flight[0]
    del world.engine._in_flight[0]  # its result will never be taken in
    world.engine._in_flight.append(world.engine._launch(step.plan))
    world.engine.close()
    with pytest.raises(ExecutionEnded):
        world.engine._in_flight[0].running.result()


def test_eos_is_the_last_token_also_of_many_sequences() -> None:
    world = make_world(async_scheduling=True, max_num_seqs=4)
    for number in range(12):
        world.add(f"r{number}", make_prompt(6, number * 40), max_tokens=40, stop_token_ids=tuple(range(128)))
    world.run()
    for name, tokens in world.output.items():
        assert all(token >= 128 for token in tokens[:-1]), name
        assert EOS not in tokens[:-1]
    world.assert_idle()
