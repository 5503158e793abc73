"""Requests go where their prefix lies, and no engine is drowned for it."""

import random
from collections import Counter
from dataclasses import dataclass

from gateway.affinity import conversation_hash, prompt_hash
from gateway.balancer import SETTLED_HALF_LIFE_S, Balancer
from shared.identifiers import EngineEpoch, EngineId

FIRST_LIFE = EngineEpoch("first life")


@dataclass
class Engine:
    engine_id: EngineId
    epoch: EngineEpoch = FIRST_LIFE
    load_tokens: int = 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def engines(count: int) -> list[Engine]:
    return [Engine(EngineId(f"model-{number}")) for number in range(count)]


def balancer(clock: Clock | None = None) -> Balancer:
    return Balancer(clock or Clock(), random.Random(1))


def test_conversations_stay_where_they_began_and_spread_evenly():
    pool, chooser = engines(2), balancer()
    homes: dict[int, list[EngineId]] = {}
    for turn in range(4):
        for conversation in range(20):
            choice = chooser.choose(pool, f"conversation {conversation}", 200 + 100 * turn)
            homes.setdefault(conversation, []).append(choice.engine_id)
    stayed = sum(turns.count(turns[0]) for turns in homes.values()) / 80
    share = Counter(turn for turns in homes.values() for turn in turns).most_common(1)[0][1] / 80
    assert stayed >= 0.9
    assert share <= 0.6


def test_two_gateways_that_know_nothing_of_each_other_agree_on_idle_engines():
    pool = engines(3)
    for number in range(50):
        prefix = f"prefix {number}"
        ours, theirs = balancer().choose(pool, prefix, 10), balancer().choose(pool, prefix, 10)
        assert ours.engine_id == theirs.engine_id


def test_an_engine_that_leaves_moves_only_its_own_prefixes():
    pool = engines(4)
    pool_without_last = pool[:-1]
    for number in range(200):
        prefix = f"prefix {number}"
        before = balancer().choose(pool, prefix, 10).engine_id
        after = balancer().choose(pool_without_last, prefix, 10).engine_id
        assert before in (after, pool[-1].engine_id)


def test_one_hot_prefix_does_not_drown_its_engine():
    pool, chooser = engines(3), balancer()
    for _ in range(300):
        choice = chooser.choose(pool, "the prompt everybody sends", 300)
        next(engine for engine in pool if engine.engine_id == choice.engine_id).load_tokens += 300
    loads = [engine.load_tokens for engine in pool]
    assert max(loads) <= 1.6 * sum(loads) / len(loads)


def test_a_restarted_engine_is_cold():
    pool, chooser = engines(2), balancer()
    home = chooser.choose(pool, "warm", 100).engine_id
    assert chooser.choose(pool, "warm", 100).reason == "affinity"
    restarted = next(engine for engine in pool if engine.engine_id == home)
    restarted.epoch = EngineEpoch("second life")
    assert chooser.choose(pool, "warm", 100).reason != "affinity"


def test_without_a_prefix_the_least_loaded_engine_is_taken_and_ties_are_drawn():
    pool, chooser = engines(3), balancer()
    assert {chooser.choose(pool, None, 10).engine_id for _ in range(50)} == {e.engine_id for e in pool}
    pool[0].load_tokens, pool[2].load_tokens = 10, 10
    choices = [chooser.choose(pool, None, 10) for _ in range(10)]
    assert {choice.engine_id for choice in choices} == {pool[1].engine_id}
    assert choices[0].reason == "least_loaded"


def test_what_was_given_out_long_ago_no_longer_counts():
    clock = Clock()
    pool, chooser = engines(2), balancer(clock)
    first = chooser.choose(pool, "a", 100_000).engine_id
    clock.now += 40 * SETTLED_HALF_LIFE_S
    homes = {chooser.choose(pool, f"new {number}", 1).engine_id for number in range(20)}
    assert first in homes


def test_a_prefix_memory_is_bounded():
    pool = engines(2)
    chooser = Balancer(Clock(), random.Random(1), max_remembered=10)
    for number in range(100):
        chooser.choose(pool, f"prefix {number}", 1)
    assert chooser.choose(pool, "prefix 0", 1).reason != "affinity"
    assert chooser.choose(pool, "prefix 99", 1).reason == "affinity"


def test_a_conversation_keeps_its_hash_and_a_shared_system_prompt_does_not_decide_it():
    system = {"role": "system", "content": "You are helpful. " * 200}
    first = [system, {"role": "user", "content": "one"}]
    later = [*first, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "two"}]
    other = [system, {"role": "user", "content": "another"}]
    assert conversation_hash("", first) == conversation_hash("", later)
    assert conversation_hash("", first) != conversation_hash("", other)
    assert conversation_hash("a", first) != conversation_hash("b", first)


def test_a_plain_prompt_that_grows_keeps_its_hash():
    prompt = list(range(200))
    assert prompt_hash("", prompt[:80]) == prompt_hash("", prompt)
    assert prompt_hash("", [1, *prompt]) != prompt_hash("", prompt)


def test_a_slow_engine_gets_its_share_of_new_conversations_while_it_keeps_up_with_them():
    pool, chooser = engines(2), balancer()
    slow = pool[0]
    placed: Counter[EngineId] = Counter()
    for number in range(40):
        choice = chooser.choose(pool, f"conversation {number}", 100)
        placed[choice.engine_id] += 1
        if choice.engine_id == slow.engine_id:
            slow.load_tokens += 100  # its requests still run when those of the other have long ended
    assert max(placed.values()) <= 0.6 * 40
