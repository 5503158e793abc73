"""Tenants and classes under the scheduler: who gets the steps when there are not enough for all."""

from __future__ import annotations

from collections import Counter

import pytest

from engine_service.fair_share import FairShare
from engine_service.refusal import Refusal
from engine_service.step_limits import FixedLimits
from shared.identifiers import TenantId
from tests.unit.worlds import expected_output, make_prompt, make_world

INTERACTIVE, STANDARD, BATCH = 0, 1, 2
NOW_S = 100.0  # as the clock of these worlds says; nobody ages


def test_two_backlogged_tenants_are_served_the_same_though_one_sends_ten_times_as_much() -> None:
    policy = FairShare(lambda: NOW_S)
    world = make_world(num_blocks=200, max_num_seqs=4, policy=policy, max_queued_requests=2000)
    for number in range(1000):
        world.add(f"loud-{number}", make_prompt(8, start=number), max_tokens=6, tenant="loud")
    for number in range(100):
        world.add(f"quiet-{number}", make_prompt(8, start=number), max_tokens=6, tenant="quiet")
    served: Counter[str] = Counter()
    while not any(name.startswith("quiet-99") for name in world.finish_order):  # both wait until then
        world.step()
    served.update(name.split("-")[0] for name in world.finish_order)
    weighted = {tenant: policy.served(TenantId(tenant)) for tenant in ("loud", "quiet")}
    assert abs(weighted["loud"] - weighted["quiet"]) < 0.1 * max(weighted.values())
    assert abs(served["loud"] - served["quiet"]) <= 0.1 * max(served.values())


@pytest.mark.parametrize("num_blocks", [400, 24], ids=["all places taken", "all blocks taken"])
def test_an_interactive_request_starts_within_two_steps_of_a_full_batch_queue(num_blocks: int) -> None:
    world = make_world(
        num_blocks=num_blocks, max_num_seqs=4, policy=FairShare(lambda: NOW_S), max_num_batched_tokens=64
    )
    submits = {
        f"batch-{number}": world.add(
            f"batch-{number}", make_prompt(8, start=number), max_tokens=16, priority=BATCH
        )
        for number in range(20)
    }
    for _ in range(5):
        world.step()
    submits["now"] = world.add("now", make_prompt(9, start=500), max_tokens=4, priority=INTERACTIVE)
    steps_before = len(world.runner.steps)
    while not any(name == "now" for name, _, _ in world.runner.steps[-1]):
        world.step()
    assert len(world.runner.steps) - steps_before <= 2
    world.run()
    world.assert_idle()
    for name, submit in submits.items():  # those who made room have lost nothing but time
        assert world.output[name] == expected_output(submit)


class LoweredLimits(FixedLimits):
    """As of a target that fewer sequences meet than run."""

    def lower(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs


def test_a_limit_that_was_lowered_lets_an_interactive_request_replace_one_other() -> None:
    limits = LoweredLimits(max_num_seqs=8, max_num_batched_tokens=64)
    world = make_world(max_num_seqs=8, policy=FairShare(lambda: NOW_S), limits=limits)
    submits = [
        world.add(f"batch-{number}", make_prompt(3, start=number), max_tokens=20, priority=BATCH)
        for number in range(9)
    ]
    world.step()
    assert world.scheduler.num_running == 8
    limits.lower(2)
    world.step()
    assert world.scheduler.num_running == 8
    submits.append(world.add("now", make_prompt(9, start=500), max_tokens=4, priority=INTERACTIVE))
    world.step()
    assert any(name == "now" for name, _, _ in world.runner.steps[-1])
    assert (world.scheduler.num_running, world.scheduler.num_preemptions) == (8, 1)
    world.run()
    for submit in submits:
        assert world.output[submit.request_id] == expected_output(submit)


def test_a_standard_request_does_not_push_out_its_own_class() -> None:
    world = make_world(max_num_seqs=2, policy=FairShare(lambda: NOW_S))
    for number in range(2):
        world.add(f"first-{number}", make_prompt(5, start=number), max_tokens=20)
    world.step()
    world.add("later", make_prompt(5, start=50), max_tokens=2)
    world.run()
    assert world.engine.load().num_preemptions == 0
    assert world.finish_order[-1] == "later"


def test_a_long_prompt_takes_no_step_away_from_those_who_decode() -> None:
    world = make_world(
        num_blocks=400, max_num_batched_tokens=16, max_model_len=1000, long_prefill_token_threshold=8
    )
    world.add("long", make_prompt(300), max_tokens=2)
    world.step()
    for number in range(8):
        world.add(f"short-{number}", make_prompt(1, start=number), max_tokens=20)
    for _ in range(4):
        world.step()
    for step in world.runner.steps[5:20]:
        decoding = [name for name, _, num_tokens in step if name.startswith("short")]
        assert len(decoding) == 8, "each of them gets its token in each step"
        assert sum(num_tokens for name, _, num_tokens in step if name == "long") <= 8
    world.run()
    world.assert_idle()


def test_a_long_prompt_that_is_alone_gets_the_whole_budget() -> None:
    world = make_world(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    world.add("long", make_prompt(64), max_tokens=2)
    world.run()
    assert [num_tokens for step in world.runner.steps for _, _, num_tokens in step][:4] == [16] * 4


def test_the_queue_is_bounded_by_tokens_too_but_never_refuses_the_only_one() -> None:
    world = make_world(num_blocks=200, max_num_seqs=1, max_queued_tokens=50)
    world.add("runs", make_prompt(10), max_tokens=50)
    world.step()
    world.add("waits", make_prompt(150, start=1), max_tokens=2)  # longer than the bound, but alone
    with pytest.raises(Refusal) as caught:
        world.add("too much", make_prompt(10, start=2))
    assert caught.value.code == "queue_full"
    world.run()
    world.add("again", make_prompt(10, start=2))
    world.run()
    world.assert_idle()
