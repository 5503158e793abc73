"""Engines with a fake model, each configured by chance and small enough to run out of everything."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine_service.fair_share import FairShare
from engine_service.fake_runner import FakeModel
from engine_service.scheduling_policy import FirstComeFirstServed, SchedulingPolicy
from engine_service.sequence import Sequence
from engine_service.step_limits import FixedLimits
from tests.unit.naive_engine import Rules
from tests.unit.worlds import EOS, ManualClock, World, make_world

MAX_MODEL_LEN = 48
_SAYS = range(40)  # few tokens, so that stop tokens and bad words are met often


class AnyVictim(FirstComeFirstServed[Sequence]):
    """Whoever runs may have to yield."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def victim(self, candidates: list[Sequence]) -> Sequence:
        return self._rng.choice(candidates)


class VaryingLimits(FixedLimits):
    """Each step may do less than is configured, and nobody knows how much."""

    def __init__(self, rng: random.Random, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        super().__init__(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._rng = rng
        self._most = max_num_seqs

    def max_num_tokens(self, num_decoding: int) -> int:
        self.max_num_seqs = self._rng.randint(1, self._most)
        return self._rng.randint(1, self._max_num_batched_tokens)


@dataclass(frozen=True)
class SmallEngine:
    """How one of them is configured."""

    rules: Rules
    policy: str
    force_preemption_every: int
    limits_vary: bool
    async_scheduling: bool
    model: FakeModel
    seed: int

    def world(self) -> World:
        clock = ManualClock()
        rules = self.rules
        policies: dict[str, SchedulingPolicy] = {
            "fair_share": FairShare(clock, ageing_s=1e9),
            "any_victim": AnyVictim(random.Random(self.seed)),
        }
        limits = VaryingLimits(
            random.Random(self.seed),
            max_num_seqs=rules.max_num_seqs,
            max_num_batched_tokens=rules.max_num_batched_tokens,
        )
        return make_world(
            num_blocks=rules.num_blocks,
            block_size=rules.block_size,
            max_num_seqs=rules.max_num_seqs,
            max_num_batched_tokens=rules.max_num_batched_tokens,
            max_model_len=rules.max_model_len,
            max_queued_requests=rules.max_queued_requests,
            max_queued_tokens=rules.max_queued_tokens,
            long_prefill_token_threshold=rules.long_prefill_token_threshold,
            enable_prefix_caching=rules.enable_prefix_caching,
            force_preemption_every=self.force_preemption_every,
            policy=policies.get(self.policy),
            limits=limits if self.limits_vary else None,
            model=self.model,
            async_scheduling=self.async_scheduling,
        )


def small_engine(number: int) -> SmallEngine:
    """All kinds in turn, all else by chance."""
    rng = random.Random(number)
    policy = ["fcfs", "fair_share", "any_victim"][number // 2 % 3]
    force_preemption_every = rng.choice([0, 0, 0, 0, 1, 3])
    block_size = rng.choice([1, 2, 4, 7])
    rules = Rules(
        block_size=block_size,
        num_blocks=rng.choice([40, 50, 60, 80, 250]) // block_size,
        max_num_seqs=rng.choice([1, 3, 5, 5, 12]),
        max_num_batched_tokens=rng.choice([3, 8, 20, 64]),
        max_model_len=MAX_MODEL_LEN,
        max_queued_requests=rng.choice([4, 10, 25]),
        max_queued_tokens=rng.choice([None, None, None, 80, 20]),
        long_prefill_token_threshold=rng.choice([None, None, 2, 6]),
        enable_prefix_caching=rng.random() < 0.8,
        in_order_of_arrival=policy != "fair_share",
        newest_yields=policy == "fcfs" and not force_preemption_every,
        classes_in_order=policy == "fair_share",
    )
    return SmallEngine(
        rules,
        policy,
        force_preemption_every,
        limits_vary=rng.random() < 0.25 and force_preemption_every != 1,  # else it takes for ever
        async_scheduling=number % 2 == 1,
        model=FakeModel(_SAYS, eos_token_id=EOS, eos_every=rng.choice([0, 12]), closers=frozenset()),
        seed=number,
    )
