"""Forgetting the prefix cache, at any moment, and adapters that share nothing through it."""

from __future__ import annotations

import pytest

from engine_service.kv_events import AllBlocksCleared
from engine_service.sequence import Sequence
from shared.identifiers import RequestId, TenantId
from tests.unit.worlds import World, expected_output, make_prompt, make_sampling, make_world


def cached_tokens_of(world: World, name: str, prompt: list[int]) -> int:
    """Runs a request; how much of its prompt the cache had."""
    submit = world.add(name, prompt)
    sequence = world.sequence(name)
    world.run()
    assert world.output[name] == expected_output(submit)
    return sequence.num_cached_tokens


def test_after_a_reset_nothing_is_found_and_the_cache_fills_again() -> None:
    world = make_world()
    prompt = make_prompt(20)
    assert cached_tokens_of(world, "first", prompt) == 0
    assert cached_tokens_of(world, "hit", prompt) == 19
    assert world.engine.reset_prefix_cache() == 5
    assert isinstance(world.kv_events[-1], AllBlocksCleared)
    world.assert_idle()
    assert cached_tokens_of(world, "after", prompt) == 0
    assert cached_tokens_of(world, "hit again", prompt) == 19
    world.assert_idle()


@pytest.mark.parametrize("during_step", [0, 1, 2])  # of a prompt in two chunks, and of its decoding
@pytest.mark.parametrize("is_between_plan_and_update", [True, False])
def test_what_was_planned_or_computed_before_a_reset_is_never_found(
    during_step: int, is_between_plan_and_update: bool
) -> None:
    world = make_world(max_num_batched_tokens=12)
    prompt = make_prompt(20)
    running = world.add("running", prompt, max_tokens=16)
    for _ in range(during_step):
        world.step()
    if is_between_plan_and_update:

        def reset() -> tuple[RequestId, ...]:
            world.engine.reset_prefix_cache()
            return ()

        for update in world.engine.step(reset).updates:
            world.output["running"] += update.new_token_ids
        may_publish = False
    else:
        world.engine.reset_prefix_cache()
        world.step()
        may_publish = during_step == 0  # it was still waiting, so that all of it is computed afterwards
    world.engine.check()
    assert bool(world.pool.cached_hashes()) == may_publish
    world.run()
    assert bool(world.pool.cached_hashes()) == may_publish
    assert world.output["running"] == expected_output(running)
    assert cached_tokens_of(world, "next", prompt) == (19 if may_publish else 0)
    assert cached_tokens_of(world, "hit", prompt) == 19
    world.assert_idle()


def test_a_request_on_top_of_a_cached_prefix_survives_a_reset_and_does_not_bring_it_back() -> None:
    world = make_world()
    prompt = make_prompt(20)
    assert cached_tokens_of(world, "first", prompt) == 0
    submit = world.add("running", prompt, max_tokens=10)
    world.step()
    assert world.sequence("running").num_cached_tokens == 19
    world.engine.reset_prefix_cache()
    world.run()
    assert world.output["running"] == expected_output(submit)
    assert world.pool.cached_hashes() == set()


def test_a_sequence_that_starts_over_after_a_reset_publishes_again() -> None:
    world = make_world(force_preemption_every=3)
    world.add("r", make_prompt(9), max_tokens=8)
    world.step()
    world.engine.reset_prefix_cache()
    world.step()
    assert world.pool.cached_hashes() == set()
    world.step()  # it is preempted
    world.run()
    assert len(world.pool.cached_hashes()) == 4
    world.assert_idle()


def test_adapters_share_nothing() -> None:
    world = make_world()

    def run(name: str, adapter: str) -> int:
        prompt = make_prompt(20)
        sequence = Sequence(
            RequestId(name), prompt, len(prompt), make_sampling(1), TenantId("acme"), adapter=adapter
        )
        world.scheduler.add(sequence)
        while (plan := world.scheduler.schedule()) is not None:
            world.scheduler.update(plan, world.runner.execute(world.runner.prepare(plan)))
            world.scheduler.check()
        return sequence.num_cached_tokens

    assert [run("base", ""), run("lora-a", "a"), run("lora-b", "b")] == [0, 0, 0]
    assert [run("base again", ""), run("lora-a again", "a"), run("lora-b again", "b")] == [19, 19, 19]
