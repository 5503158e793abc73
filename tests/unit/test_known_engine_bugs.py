"""Bugs that other engines have had, each as a test of ours.

The numbers are those of a table of reports against vLLM, SGLang, nano-vllm and their kin. Where nothing else
is said the test is below; most of those run with and without overlap of steps.

 1  a preempted sequence comes back with a wrong count of cached tokens
 2  a block can be found before it holds anything
 4  one request needs more blocks than exist          also test_scheduler.py, "what can never run"
 5  a victim of preemption has a row already, or the
    one behind it is passed over                      also test_engine_model_based.py
 6  overlap, and preemption in the middle of a prompt test_step_overlap.py, "a random trace ..."
 7  penalties, bad words and grammars count on tokens
    that are not known yet
 9  one request that cannot run yet holds up the rest also test_structured_output_scheduling.py, and
                                                      integration/test_watchdog.py for standing still
10  preemption between the chunks of a prompt poisons
    the cache
12  log-probabilities of a prompt that is cached      test_prompt_logprobs.py
13  pieces of stop strings in the stream              test_detokenizer.py, e2e/test_real_model.py
15  a decoder that goes back, or is quadratic         test_detokenizer.py
16  an abort of what is in flight                     also test_scheduler.py, "aborts"
17  zombies of clients that left; aborts by prefix    integration/test_departures.py; "an abort may name ..."
                                                      in integration/test_engine_service.py
20  an engine that dies or stands still               integration/test_departures.py, test_watchdog.py
21  orphans, left-over sockets, port collisions       integration/test_supervisor.py, test_engine_service.py
22  a grammar that fails, or goes on after its end    also test_structured_output.py and
                                                      test_structured_output_scheduling.py
24  a result that depends on the row in the batch     also test_sampler.py, e2e/test_same_tokens.py
25  a field of a request ends or slows the engine     integration/test_field_fuzz.py
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from engine_service.compute_thread import ComputeThread
from engine_service.engine import Engine
from engine_service.fair_share import FairShare
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_runner import ModelRunner
from engine_service.refusal import Refusal
from engine_service.sequence import SequenceState
from engine_service.served_model import ServedModel, build_engine
from engine_service.step_execution import OverlappedExecution
from engine_service.structured_output.grammar_desk import COMPILE_TIMEOUT_S, GrammarDesk
from shared.byte_text import byte_text_bundle
from shared.config import ModelConfig
from tests.models import write_tiny_llama
from tests.unit.grammar_worlds import (
    WAIT_S,
    CountGrammar,
    InProcessCompiler,
    TextWorld,
    ToldCompiler,
    form,
    run_to_the_end,
)
from tests.unit.worlds import World, expected_output, make_prompt, make_submit, make_world

both_loops = pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlapped"])


def rows_of(world: World, name: str) -> list[tuple[int, int]]:
    """(start, number of tokens) of each row that the request had."""
    return [(start, count) for step in world.runner.steps for who, start, count in step if who == name]


# ---------------------------------------------------------------------- 1


@both_loops
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_a_preempted_sequence_goes_on_behind_its_own_cached_blocks(
    block_size: int, async_scheduling: bool
) -> None:
    world = make_world(num_blocks=40 // block_size, block_size=block_size, async_scheduling=async_scheduling)
    submits = [
        world.add(name, make_prompt(13, start), max_tokens=20) for name, start in (("a", 0), ("b", 300))
    ]
    world.run()
    assert world.scheduler.num_preemptions > 0
    starts = [start for start, _ in rows_of(world, "b")]
    restarts = [start for before, start in itertools.pairwise(starts) if start < before]
    assert restarts, "it never started over"
    assert all(start > 0 for start in restarts), "it has not found its own blocks"
    for submit in submits:
        assert world.output[submit.request_id] == expected_output(submit)
    world.assert_idle()


# ---------------------------------------------------------------------- 2


@both_loops
def test_of_two_equal_prompts_in_one_step_neither_reads_what_nobody_writes(async_scheduling: bool) -> None:
    """The fake runner fails where a slot is read that nobody has written."""
    world = make_world(max_num_batched_tokens=7, async_scheduling=async_scheduling)
    submits = [world.add(name, make_prompt(30), max_tokens=5) for name in ("first", "second")]
    world.run()
    written = 0
    for step in world.runner.steps:
        for _, start, num_tokens in step:
            assert start <= written, f"{step} begins behind all that was computed"
            written = max(written, start + num_tokens)
    for submit in submits:
        assert world.output[submit.request_id] == expected_output(submit)
    world.assert_idle()


# ---------------------------------------------------------------------- 4


@both_loops
def test_a_request_for_more_blocks_than_exist_is_refused_and_one_that_fills_them_runs(
    async_scheduling: bool,
) -> None:
    world = make_world(num_blocks=2, block_size=4, async_scheduling=async_scheduling)
    served = world.add("served", make_prompt(3), max_tokens=6)  # the last token needs no room
    world.step()
    for prompt, max_tokens, param in ((12, 1, "max_tokens"), (8, 2, "max_tokens"), (200, 1, "prompt")):
        with pytest.raises(Refusal) as refusal:
            world.add("too large", make_prompt(prompt, 300), max_tokens=max_tokens)
        assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", param)
    other = world.add("other", make_prompt(8, 500), max_tokens=1)
    world.run(max_steps=20)
    for submit in (served, other):
        assert world.output[submit.request_id] == expected_output(submit)
    world.assert_idle()


# ---------------------------------------------------------------------- 5


@both_loops
@pytest.mark.parametrize("seed", range(3))
def test_whoever_decodes_has_a_row_in_each_step_or_is_preempted(seed: int, async_scheduling: bool) -> None:
    """Random classes in a small pool: victims come from the middle of those that run."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = make_world(
        num_blocks=14,
        max_num_seqs=6,
        max_num_batched_tokens=10,
        policy=FairShare(lambda: 100.0),
        async_scheduling=async_scheduling,
    )
    num_preempted = 0
    for number in range(150):
        if rng.random() < 0.5:
            prompt = make_prompt(rng.randint(1, 16), rng.randrange(900))
            world.add(f"r{number}", prompt, max_tokens=rng.randint(1, 20), priority=rng.randint(0, 2))
        running = [s for s in world.scheduler.sequences() if s.state is SequenceState.RUNNING]
        decoding = {s.request_id: s.num_preemptions for s in running if s.num_missing_tokens == 1}
        num_plans = len(world.runner.plans)
        world.step()
        for plan in world.runner.plans[num_plans:]:
            assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= 10
        if len(world.runner.plans) == num_plans + 1:
            computed = {row.sequence.request_id for row in world.runner.plans[-1].rows}
            for name in decoding.keys() - computed:
                assert world.sequence(name).num_preemptions > decoding[name], f"{name} was passed over"
                num_preempted += 1
    assert num_preempted >= 5
    world.run()
    world.assert_idle()


# ---------------------------------------------------------------------- 7


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    return load_model(tiny_config(str(directory)))


def tiny_config(source: str) -> ModelConfig:
    return ModelConfig(
        name="tiny",
        source=source,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=12,
        max_model_len=160,
    )


def tokens_of_a_real_model(loaded: LoadedModel, *, overlapped: bool) -> dict[str, list[int]]:
    """Every parameter that looks at the history, in a batch that is too large for its pool."""
    runner = ModelRunner(tiny_config("unused"), loaded, num_threads=1)
    execution = OverlappedExecution(ComputeThread()) if overlapped else None
    served = ServedModel(runner, runner.model_card, runner.text_bundle)
    engine: Engine = build_engine(tiny_config("unused"), served, execution=execution)
    wishes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.9, "frequency_penalty": 1.1},
        {"repetition_penalty": 0.7, "temperature": 0.8},
        {"min_tokens": 30, "stop_token_ids": tuple(range(100))},
        {"bad_words": ((7,), (20, 21), (200,)), "temperature": 1.0},
    ]
    outputs: dict[str, list[int]] = {}
    for number, wish in enumerate(wishes):
        prompt = [3 + (number * 7 + at) % 200 for at in range(9 + 11 * number)]
        options = {"max_tokens": 40, "seed": number, "ignore_eos": True, **wish}
        engine.add(make_submit(f"r{number}", prompt, **options))
        outputs[f"r{number}"] = []
    while engine.has_work:
        for update in engine.step().updates:
            outputs[update.request_id] += update.new_token_ids
        engine.check()
    assert engine.load().num_preemptions > 0
    engine.close()
    return outputs


def test_penalties_and_bad_words_see_the_same_history_with_overlap(tiny_llama: LoadedModel) -> None:
    plain = tokens_of_a_real_model(tiny_llama, overlapped=False)
    assert tokens_of_a_real_model(tiny_llama, overlapped=True) == plain
    assert 7 not in plain["r5"]
    assert len(plain["r4"]) >= 30


@both_loops
@pytest.mark.parametrize("preempt_every", [0, 3])
def test_a_bad_word_is_barred_by_the_token_that_was_just_sampled(
    preempt_every: int, async_scheduling: bool
) -> None:
    """The model would say each of these pairs, one token in one step, the other in the next."""
    world = make_world(force_preemption_every=preempt_every, async_scheduling=async_scheduling)
    barred: dict[str, set[tuple[int, ...]]] = {}
    for number in range(4):
        name, prompt = f"r{number}", make_prompt(9, 50 * number)
        said = expected_output(make_submit("undisturbed", prompt, max_tokens=12))
        barred[name] = {(said[0], said[1])}
        for _ in range(8):  # what it says instead is barred in its turn
            words = tuple(barred[name])
            probe = make_world()
            probe.add(name, prompt, max_tokens=12, bad_words=words)
            probe.run()
            barred[name].add((probe.output[name][0], probe.output[name][1]))
        world.add(name, prompt, max_tokens=12, bad_words=tuple(barred[name]))
    world.run()
    for name, words in barred.items():
        output = world.output[name]
        assert len(words) == 9
        assert len(output) == 12
        assert words.isdisjoint(itertools.pairwise(output))
    world.assert_idle()


# ---------------------------------------------------------------------- 9, 22


@both_loops
def test_a_request_whose_grammar_never_comes_holds_up_nobody(async_scheduling: bool) -> None:
    compiler = ToldCompiler()
    desk = GrammarDesk(compiler)
    world = make_world(grammars=desk, max_num_seqs=2, async_scheduling=async_scheduling)
    world.add("never", make_prompt(6), structured_output=form("grammar", "never"))
    assert compiler.asked.get(timeout=WAIT_S).text == "never"
    others = [world.add(f"r{number}", make_prompt(6, 40 * number), max_tokens=9) for number in range(5)]
    while len(world.finish_order) < len(others):
        num_steps = world.engine.load().num_steps
        world.step()
        assert world.engine.load().num_steps == num_steps + 1, "no progress"
    while not world.engine.only_awaits_grammars:
        world.step()  # takes in what was planned beyond the last end
    world.clock.now_s += COMPILE_TIMEOUT_S
    world.run(max_steps=2)
    assert world.refusals["never"].code == "invalid_request"
    for submit in others:
        assert world.output[submit.request_id] == expected_output(submit)
    world.assert_idle()
    desk.close()


@both_loops
@pytest.mark.parametrize("preempt_every", [0, 1, 3])
def test_a_grammar_takes_each_token_once_and_none_after_its_end(
    preempt_every: int, async_scheduling: bool
) -> None:
    """`CountState` fails if it is advanced after its end, or by a token that its mask did not allow."""
    compiler = ToldCompiler()
    desk = GrammarDesk(compiler)
    world = make_world(
        grammars=desk,
        num_blocks=12,
        force_preemption_every=preempt_every,
        async_scheduling=async_scheduling,
    )
    grammar = CountGrammar(7)
    compiler.tell("digits", grammar)
    for number in range(4):
        prompt = make_prompt(9, 30 * number)
        world.add(f"r{number}", prompt, max_tokens=20, structured_output=form("grammar", "digits"))
    free = world.add("free", make_prompt(5, 500), max_tokens=15)
    assert compiler.asked.get(timeout=WAIT_S).text == "digits"
    run_to_the_end(world)
    assert len(grammar.states) == 4
    for number in range(4):
        assert len(world.output[f"r{number}"]) == 7
        assert set(world.output[f"r{number}"]) <= set(range(10))
        assert world.last_update[f"r{number}"].finish_reason == "stop"
    assert sorted(state.accepted for state in grammar.states) == sorted(
        world.output[f"r{number}"] for number in range(4)
    )
    assert world.output["free"] == expected_output(free)
    desk.close()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"type": "array", "maxItems": 3,
                   "items": {"enum": ["red", "green"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def text_desk() -> Iterator[GrammarDesk]:
    desk = GrammarDesk(InProcessCompiler(byte_text_bundle()))
    yield desk
    desk.close()


@both_loops
@pytest.mark.parametrize("preempt_every", [0, 2])
def test_what_has_a_schema_validates_and_a_schema_that_makes_no_sense_is_refused_alone(
    text_desk: GrammarDesk, preempt_every: int, async_scheduling: bool
) -> None:
    options = {"num_blocks": 60, "max_num_batched_tokens": 16, "force_preemption_every": preempt_every}
    world = TextWorld(byte_text_bundle(), text_desk, async_scheduling=async_scheduling, **options)
    for number in range(6):
        world.add(f"r{number}", form("json_schema", PERSON), seed=number, max_tokens=120)
    for name, schema in (("bad", '{"type": "nothing"}'), ("no JSON", "{"), ("recursive", {"$ref": "#"})):
        try:
            world.add(name, form("json_schema", schema, is_strict=True), max_tokens=50)
        except Refusal as refusal:  # the second time it is known before
            world.world.refusals[name] = refusal
    world.add("free", None, max_tokens=20)
    world.run()
    assert world.world.refusals.keys() == {"bad", "no JSON", "recursive"}
    assert {refusal.code for refusal in world.world.refusals.values()} == {"invalid_request"}
    assert len(world.world.output["free"]) == 20
    complete = [n for n in range(6) if world.world.last_update[f"r{n}"].finish_reason == "stop"]
    assert len(complete) >= 4
    for number in complete:
        jsonschema.validate(json.loads(world.text(f"r{number}")), PERSON)


# ---------------------------------------------------------------------- 10


@both_loops
@pytest.mark.parametrize("preempt_every", [1, 2, 3])
def test_what_was_preempted_between_its_chunks_leaves_a_cache_that_can_be_trusted(
    preempt_every: int, async_scheduling: bool
) -> None:
    outputs = []
    for enable_prefix_caching in (True, False):
        world = make_world(
            max_num_batched_tokens=6,
            force_preemption_every=preempt_every,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
        )
        for round_ in range(3):
            for length in (30, 27, 30):
                name = f"r{round_}-{len(world.output)}"
                world.add(name, make_prompt(length), max_tokens=5, seed=round_, temperature=1.0)
            world.run()
        assert world.scheduler.num_preemptions > 5
        assert (world.scheduler.prefix_cache_hits > 100) == enable_prefix_caching
        world.assert_idle()
        outputs.append(world.output)
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------------- 16


def run_of_six_steps(*, async_scheduling: bool, abort_at: int | None, when: str) -> tuple[World, bool]:
    """Two chunks of a prompt and four tokens, beside a neighbour; whether the abort came in time.

    With overlap, an abort before a step meets one that is under way, and an abort during a step one more
    that was launched behind it.
    """
    world = make_world(max_num_batched_tokens=8, num_blocks=16, async_scheduling=async_scheduling)
    neighbour = world.add("neighbour", make_prompt(3, 500), max_tokens=14)
    world.step()
    submit = world.add("r", make_prompt(12), max_tokens=5)
    was_alive = False
    for number in range(8):
        is_now = number == abort_at
        was_alive |= is_now and "r" not in world.finish_order
        if is_now and when == "before":
            world.abort("r")
        num_tokens = len(world.output["r"])
        world.step(aborts=("r", "r") if is_now and when == "during" else ())
        if was_alive:
            assert len(world.output["r"]) == num_tokens, "it was told of a token after its abort"
    # Whoever comes next gets the blocks, while what was in flight may still write to them.
    next_one = world.add("next", make_prompt(30, 300), max_tokens=6)
    world.run()
    assert world.output["r"] == expected_output(submit)[: len(world.output["r"])]
    for each in (neighbour, next_one):
        assert world.output[each.request_id] == expected_output(each)
    world.assert_idle()
    return world, was_alive


@both_loops
@pytest.mark.parametrize("when", ["before", "during"])
def test_an_abort_at_any_point_of_a_run_frees_everything_once(when: str, async_scheduling: bool) -> None:
    undisturbed, _ = run_of_six_steps(async_scheduling=async_scheduling, abort_at=None, when=when)
    assert len(undisturbed.output["r"]) == 5
    num_said = []
    for abort_at in range(8):
        world, was_alive = run_of_six_steps(async_scheduling=async_scheduling, abort_at=abort_at, when=when)
        assert ("r" in world.finish_order) != was_alive
        num_said.append(len(world.output["r"]))
    assert num_said == sorted(num_said)
    assert set(num_said) == set(range(6)), "an abort was tried before each of its tokens, and after the last"


@both_loops
def test_an_abort_in_the_step_that_ends_the_request_wins_and_nothing_is_freed_twice(
    async_scheduling: bool,
) -> None:
    world = make_world(async_scheduling=async_scheduling)
    world.add("r", make_prompt(6), max_tokens=3)
    while len(world.output["r"]) < 2:
        world.step()
    assert world.step(aborts=("r",)) == []
    assert not world.abort("r")
    world.run()
    assert world.finish_order == []
    world.assert_idle()


# ---------------------------------------------------------------------- 24


@both_loops
@pytest.mark.parametrize("seed", range(3))
def test_a_request_says_the_same_alone_and_in_company_that_comes_and_goes(
    seed: int, async_scheduling: bool
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = make_world(
        num_blocks=24,
        max_num_seqs=5,
        max_num_batched_tokens=9,
        force_preemption_every=rng.choice([0, 4]),
        async_scheduling=async_scheduling,
    )
    submits = []
    for number in range(30):
        # Equal prompts, and seeds that some share: neither may be told apart, or mixed up, by the row.
        submits.append(
            world.add(
                f"r{number}",
                make_prompt(rng.choice([5, 14]), rng.choice([0, 300])),
                max_tokens=rng.randint(1, 12),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                seed=rng.randint(0, 2),
            )
        )
        for _ in range(rng.randint(0, 3)):
            world.step(aborts=(f"r{rng.randint(0, number)}",) if rng.random() < 0.2 else ())
    world.run()
    finished = [submit for submit in submits if submit.request_id in world.finish_order]
    assert len(finished) > 20
    for submit in finished:
        assert world.output[submit.request_id] == expected_output(submit)
    assert len({tuple(world.output[submit.request_id]) for submit in finished}) > 15
    world.assert_idle()
