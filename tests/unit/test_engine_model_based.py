"""The engine against a naive reference: requests, aborts, deadlines, resets and steps, in any order.

Each of some small engines is put through histories of things that may happen to it. The reference is in
naive_engine.py. `make soak` goes on for longer, with a seed of its own.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine_service.fake_runner import FakeModel
from engine_service.kv_events import BlockRemoved
from engine_service.refusal import Refusal
from shared.messages import Submit
from tests.unit.naive_engine import Asked, NaiveEngine, answer_to
from tests.unit.small_engines import MAX_MODEL_LEN, SmallEngine, small_engine
from tests.unit.worlds import EOS, make_submit

# ---------------------------------------------------------------------- what a client asks for


@dataclass(frozen=True)
class Wish:
    """What a client may ask for beside its prompt. Numbers that choose among things wrap around."""

    max_tokens: int
    min_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    stop_at: int | None  # the token that it would say there becomes a stop token
    bad_word_at: int | None  # and there ends a word that it must not say
    bad_word_tokens: int
    is_scored: bool  # whether log-probabilities of the prompt are wanted
    num_given: int  # tokens that another engine has generated already
    salt: str
    tenant: str
    priority: int
    timeout_s: float | None

    def submit(self, name: str, prompt: list[int], model: FakeModel, leader: str | None) -> Submit:
        options: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "prompt_logprobs": 1 if self.is_scored else None,
            "cache_salt": self.salt,
            "tenant": self.tenant,
            "priority": self.priority,
            "timeout_s": self.timeout_s,
            "shares_prompt_with": leader,
        }

        def says() -> list[int]:
            return answer_to(make_submit(name, prompt, **options), model, MAX_MODEL_LEN).token_ids

        if self.stop_at is not None:
            said = says()
            options["stop_token_ids"] = (said[self.stop_at % len(said)],)
        if self.bad_word_at is not None:
            said = says()
            end = self.bad_word_at % len(said) + 1
            options["bad_words"] = (tuple(said[max(0, end - self.bad_word_tokens) : end]),)
        if self.num_given:
            said = says()
            options["output"] = said[: min(self.num_given, len(said) - 1)]
        return make_submit(name, prompt, **options)


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any) -> st.SearchStrategy[Any]:
    return st.one_of([*[st.just(otherwise)] * 4, strategy])


wishes = st.builds(
    Wish,
    max_tokens=st.integers(1, 8) | st.integers(8, 30),
    min_tokens=st.sampled_from([0, 0, 0, 2, 4]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1),
    ignore_eos=st.booleans(),
    stop_at=rarely(st.integers(0, 7), None),
    bad_word_at=rarely(st.integers(0, 7), None),
    bad_word_tokens=st.integers(1, 2),
    is_scored=rarely(st.booleans(), False),
    num_given=rarely(st.integers(1, 4), 0),
    salt=rarely(st.just("a"), ""),
    tenant=st.sampled_from("abc"),
    priority=st.integers(0, 2),
    timeout_s=rarely(st.sampled_from([None, 0.0, 1.0, 3.0]), None),
)
# Few beginnings, so that prefixes are shared, and ends that differ.
prompts = st.builds(
    lambda root, length, end, own: [*range(root, root + length), *range(end, end + own)],
    root=st.sampled_from([100, 200]),
    length=st.integers(1, 16) | st.sampled_from([30, 60]),
    end=st.sampled_from([500, 600, 700]),
    own=st.integers(0, 5),
)
beginnings = st.lists(st.sampled_from([100, 100, 200, 300]), min_size=2, max_size=6)
anyone = st.integers(0, 50)


# ---------------------------------------------------------------------- the machine


class EngineMachine(RuleBasedStateMachine):
    """Each rule is one thing that may happen to an engine. What happened is counted in `seen`."""

    engine: ClassVar[SmallEngine]
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.world = self.engine.world()
        self.naive = NaiveEngine(self.engine.rules, self.engine.model, self.seen)
        self.num_asked = self.num_idle_steps = 0

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # else it has failed already
                self._run_to_the_end()
        finally:
            self.world.engine.close()  # a step in flight of a test that failed must not wait for ever

    def _run_to_the_end(self) -> None:
        world = self.world
        num_steps_without = 0
        while world.engine.has_work:
            num_done = self.naive.num_generated_tokens + len(self.naive.ended)
            self._step()
            is_done = self.naive.num_generated_tokens + len(self.naive.ended) > num_done
            num_steps_without = 0 if is_done else num_steps_without + 1
            assert num_steps_without < 500, "it works and nobody is answered"
        assert not self.naive.live, f"never answered: {list(self.naive.live)}"
        world.assert_idle()
        load = world.engine.load()
        assert load.num_running == load.num_waiting == load.outstanding_tokens == 0
        is_forced = self.engine.force_preemption_every > 0
        self.seen["preemptions, forced" if is_forced else "preemptions"] += load.num_preemptions
        self.seen["engine steps"] += load.num_steps
        self.seen["engine steps with overlap"] += load.num_steps * self.engine.async_scheduling

    @invariant()
    def everything_is_accounted_for(self) -> None:
        """After each rule."""
        self.seen["rules"] += 1
        load, live = self.world.engine.load(), self.naive.live
        assert load.num_running + load.num_waiting == len(live)
        assert (
            load.num_running == sum(asked.runs for asked in live.values()) <= self.engine.rules.max_num_seqs
        )
        said = (self.naive.num_prompt_tokens, self.naive.num_generated_tokens)
        assert (load.prompt_tokens, load.generation_tokens) == said
        if live or not self.engine.async_scheduling:
            assert self.world.engine.has_work == bool(live)

    # ------------------------------------------------------------------ things that happen

    @rule(prompt=prompts, wish=wishes)
    def ask(self, prompt: list[int], wish: Wish) -> None:
        self._ask(prompt, wish)

    @precondition(lambda self: self.num_asked)
    @rule(which=anyone, length=st.integers(1, MAX_MODEL_LEN), own=st.integers(0, 2), wish=wishes)
    def ask_again(self, which: int, length: int, own: int, wish: Wish) -> None:
        """A next turn of a conversation, or a part of it."""
        everyone = list(self.naive.everyone())
        if everyone:
            said = everyone[which % len(everyone)].token_ids[:length]
            self._ask([token_id for token_id in said if token_id != EOS] + [800, 801][:own], wish)

    @initialize(starts=beginnings, wish=wishes)
    def ask_at_first(self, starts: list[int], wish: Wish) -> None:
        self.ask_several(starts, wish)

    @rule(starts=beginnings, wish=wishes)
    def ask_several(self, starts: list[int], wish: Wish) -> None:
        for seed_, start in enumerate(starts):
            self._ask([*range(start, start + 9 + len(starts))], dataclasses.replace(wish, seed=seed_))

    @precondition(lambda self: self.naive.live)
    @rule(which=anyone, wish=wishes)
    def ask_for_another_choice(self, which: int, wish: Wish) -> None:
        leader = self._one_of_the_live(which)
        self._ask(leader.submit.prompt_token_ids, wish, leader=leader.name)

    @rule()
    def step(self) -> None:
        self._step()

    @rule(num_steps=st.integers(2, 12))
    def more_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.world.engine.has_work:
                self._step()

    @precondition(lambda self: self.naive.live)
    @rule(which=anyone, how=st.sampled_from(["now", "during a step", "twice"]))
    def abort(self, which: int, how: str) -> None:
        asked = self._one_of_the_live(which)
        if how != "now":
            self._step(
                aborts=(asked.name,) if how == "during a step" else (asked.name, asked.name, "unknown")
            )
            return
        self.seen["aborted, running" if asked.runs else "aborted, waiting"] += 1
        assert self.world.abort(asked.name)
        assert not self.world.abort(asked.name), "it was aborted twice"
        self.naive.end(asked.name)

    @rule(what=st.sampled_from(["reset", "reset during a step", "time passes", "a name that is taken"]))
    def something_rare(self, what: str) -> None:
        """One rule for all of these, so that they do not come too often."""
        if what == "reset":
            self.world.engine.reset_prefix_cache()
            self.naive.reset()
        elif what == "reset during a step":
            self._step(with_reset=True)
        elif what == "time passes":
            self.world.clock.now_s += 1.0
        elif self.naive.live:
            submit = next(iter(self.naive.live.values())).submit
            self._add(submit)

    # ------------------------------------------------------------------ inside

    def _ask(self, prompt: list[int], wish: Wish, leader: str | None = None) -> None:
        self._add(wish.submit(f"r{self.num_asked}", prompt or [1], self.engine.model, leader))

    def _add(self, submit: Submit) -> None:
        self.num_asked += 1
        expected = self.naive.refusal_of(submit)
        if expected is not None:
            with pytest.raises(Refusal) as caught:
                self.world.submit(submit)
            assert (caught.value.code, caught.value.param) == expected
            self.seen[f"refused: {caught.value.code}, {caught.value.param}"] += 1
            return
        self.world.submit(submit)
        self.naive.accept(submit, self.world.sequence(submit.request_id), self.world.clock.now_s)
        self.seen["accepted"] += 1

    def _one_of_the_live(self, which: int) -> Asked:
        live = list(self.naive.live.values())
        return live[which % len(live)]

    def _step(self, aborts: tuple[str, ...] = (), *, with_reset: bool = False) -> None:
        """One step; the plans are looked at before anything else of it, also if they are asked for later."""
        world, naive = self.world, self.naive
        late = naive.late(world.clock.now_s)
        waited = [asked for asked in naive.live.values() if asked.waits]
        decoding = [asked for asked in naive.live.values() if asked.runs and asked.num_missing == 1]
        num_plans, num_events = len(world.runner.plans), len(world.kv_events)
        num_steps = world.engine.load().num_steps
        plans_once = num_plans > num_steps or not self.engine.async_scheduling
        num_preemptions = world.scheduler.num_preemptions
        aborted: set[str] = set()
        passed_over: list[Asked] = []  # who waits and might have run
        are_plans_seen = False

        def see_plans() -> None:
            nonlocal are_plans_seen
            if not are_plans_seen:
                are_plans_seen = True
                for name in late:
                    naive.end(name)
                plans = world.runner.plans[num_plans:]
                for plan in plans:
                    naive.see_plan(plan.rows)
                if plans_once:  # else it is not known who waited before the second plan
                    computed = {row.sequence.request_id for plan in plans for row in plan.rows}
                    naive.check_turns(computed, decoding, waited)
                    rows = [row for plan in plans for row in plan.rows]
                    if passed_over and not self.engine.limits_vary:
                        naive.check_that_budget_is_used(rows, passed_over)

        def while_it_computes() -> Iterator[str]:
            if world.scheduler.num_preemptions == num_preemptions:
                passed_over.extend(naive.who_might_run(world.pool.num_free_blocks))
            if with_reset:
                naive.may_have_evicted = True  # what was is told with the reset
                see_plans()
                world.engine.reset_prefix_cache()
                naive.reset()
                self.seen["reset during a step"] += 1
            aborted.update(set(aborts) - late)
            yield from aborts

        updates = world.step(aborts=while_it_computes())
        if not with_reset:
            naive.may_have_evicted |= any(isinstance(it, BlockRemoved) for it in world.kv_events[num_events:])
        see_plans()
        for name in aborted & naive.live.keys():
            naive.end(name)
            self.seen["aborted during a step"] += 1
        assert len({update.request_id for update in updates}) == len(updates)
        told = {update.request_id for update in updates if update.finish_reason == "abort"}
        assert told == late, f"late: {late}; told so: {told}"
        for update in updates:
            if update.finish_reason == "abort":
                assert not update.new_token_ids
                self.seen["late"] += 1
            else:
                naive.hear(update)
        has_done_something = world.engine.load().num_steps > num_steps
        self.num_idle_steps = 0 if has_done_something or not naive.live else self.num_idle_steps + 1
        assert self.num_idle_steps <= (self.engine.force_preemption_every > 0), "no progress"


# ---------------------------------------------------------------------- the runs


def explore(
    num_engines: int, num_histories: int, num_rules: int, *, first_seed: int = 0, shrink: bool = True
) -> Counter[str]:
    """So many histories, of so many rules each, of each engine. Returns what was seen.

    A history that fails is made shorter, if wanted.
    """
    seen: Counter[str] = Counter()
    began_s = time.monotonic()
    for number in range(first_seed, first_seed + num_engines):
        machine = type("Machine", (EngineMachine,), {"engine": small_engine(number), "seen": seen})
        try:
            run_state_machine_as_test(
                seed(number)(machine),
                settings=settings(
                    max_examples=num_histories,
                    stateful_step_count=num_rules,
                    database=None,
                    deadline=None,
                    phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
                    report_multiple_bugs=False,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except BaseException as error:
            error.add_note(f"engine number {number}: {small_engine(number)}")
            raise
    print(f"{time.monotonic() - began_s:.1f} s, from seed {first_seed}: {dict(sorted(seen.items()))}")
    return seen


EVERYTHING = {
    "aborted during a step",
    "aborted, running",
    "aborted, waiting",
    "engine steps with overlap",
    "finished: length",
    "finished: stop",
    "follows another",
    "found a part of a block",
    "found a prefix",
    "late",
    "preemptions",
    "preemptions, forced",
    "refused: context_length_exceeded, max_tokens",
    "refused: context_length_exceeded, prompt",
    "refused: invalid_request, min_tokens",
    "refused: invalid_request, request_id",
    "refused: queue_full, None",
    "reset during a step",
    "reset while some ran",
    "skipped blocks of another",
    "waited to be taken whole",
}


@pytest.mark.timeout(900)  # to make a history shorter that has failed takes minutes
def test_five_thousand_random_events_leave_every_request_with_its_answer() -> None:
    seen = explore(num_engines=18, num_histories=7, num_rules=44)
    assert seen["rules"] >= 5_000
    assert not EVERYTHING - seen.keys(), "something did not happen at all"
    assert seen["finished: length"] + seen["finished: stop"] >= 1000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_quarter_million_random_events_do() -> None:
    seen = explore(700, 8, 50, first_seed=random.randrange(10**9))
    assert seen["rules"] >= 250_000
