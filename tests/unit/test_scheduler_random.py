"""Random traffic through small pools: invariants after each step, and the tokens of an undisturbed run."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine_service.fair_share import FairShare
from engine_service.refusal import Refusal
from engine_service.scheduling_policy import FirstComeFirstServed
from engine_service.sequence import Sequence
from shared.messages import Submit
from tests.unit.worlds import World, expected_output, make_prompt, make_submit, make_world


class RandomVictim(FirstComeFirstServed):
    """Anybody may have to yield, as under a policy of priorities."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def victim(self, candidates: list[Sequence]) -> Sequence:
        return self._rng.choice(candidates)


@pytest.mark.parametrize("seed", range(9))
def test_random_traffic_keeps_the_invariants_and_the_tokens(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 5])
    budget = rng.choice([5, 16, 64])
    pool_tokens = rng.choice([60, 80])
    world = make_world(
        num_blocks=pool_tokens // block_size,
        block_size=block_size,
        max_num_seqs=rng.choice([3, 8, 16]),
        max_num_batched_tokens=budget,
        max_model_len=60,
        max_queued_requests=20,
        enable_prefix_caching=seed % 3 != 0,
        force_preemption_every=rng.choice([3, 7]) if seed in (2, 5) else 0,
        policy=FairShare(lambda: 100.0) if seed >= 6 else RandomVictim(rng) if seed % 2 else None,
        long_prefill_token_threshold=rng.choice([None, 3]),
        max_queued_tokens=rng.choice([None, 150]),
    )
    submits: dict[str, Submit] = {}
    aborted: set[str] = set()
    refusals: Counter[str] = Counter()
    for operation in range(700):
        _do_something(world, rng, f"r{operation}", submits, aborted, refusals)
    world.run()
    world.assert_idle()
    for name, submit in submits.items():
        expected = expected_output(submit)
        output = submit.output_token_ids + world.output[name]
        if name in aborted:
            assert output == expected[: len(output)]
        else:
            assert output == expected[: 60 - len(submit.prompt_token_ids)]
            assert world.last_update[name].finish_reason == "length"
    for step in world.runner.steps:
        assert sum(num_tokens for _, _, num_tokens in step) <= budget
        assert len({name for name, _, _ in step}) == len(step)
    assert len(submits) > 50
    assert aborted
    assert set(refusals) <= {"queue_full", "context_length_exceeded"}
    assert world.engine.load().num_preemptions >= 5


def _do_something(
    world: World,
    rng: random.Random,
    name: str,
    submits: dict[str, Submit],
    aborted: set[str],
    refusals: Counter[str],
) -> None:
    """Adds a request, aborts one (at any point of its life), or makes a step."""
    choice = rng.random()
    if choice < 0.25:
        # Few different beginnings, so that prefixes are shared; some carry on from another engine.
        prompt = make_prompt(rng.randint(1, 30), start=rng.choice([0, 0, 0, 300, rng.randint(0, 899)]))
        options: dict[str, Any] = {"max_tokens": rng.randint(2, 20)}
        if rng.random() < 0.3:
            options |= {"temperature": 1.0, "seed": rng.randint(0, 99)}
        options |= {"tenant": rng.choice("abc"), "priority": rng.choice([0, 1, 1, 2])}
        if rng.random() < 0.2:
            options["cache_salt"] = rng.choice(["a", "b"])
        if rng.random() < 0.2:  # carries on what another engine began
            options["output"] = expected_output(make_submit(name, prompt, **options))[: rng.randint(0, 1)]
        try:
            submits[name] = world.add(name, prompt, **options)
        except Refusal as refusal:
            refusals[refusal.code] += 1
    elif choice < 0.3 and submits:
        victim = rng.choice(list(submits))
        if world.abort(victim):
            aborted.add(victim)
        assert not world.abort(victim)
    else:
        in_flight = [name for name in submits if world.scheduler.get(submits[name].request_id)]
        during = tuple(rng.sample(in_flight, 1)) if in_flight and rng.random() < 0.15 else ()
        world.step(aborts=during)
        aborted.update(during)
    world.engine.check()
