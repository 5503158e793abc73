"""The batching model against schedules worked out by hand, and against what must hold for any."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from loadtest.simulator.batching_model import BatchingModel, BatchingParameters, Step
from shared.errors import ConfigError

ROUND = BatchingParameters(  # numbers that are easily added up
    step_base_s=1.0,
    step_per_sequence_s=0.1,
    step_per_prefill_token_s=0.01,
    max_num_seqs=2,
    max_step_tokens=10,
)


def all_steps(model: BatchingModel[str]) -> list[Step[str]]:
    steps = []
    while (step := model.next_step()) is not None:
        steps.append(step)
    return steps


def test_one_request_is_computed_in_chunks_and_then_token_by_token() -> None:
    model = BatchingModel[str](ROUND)
    model.submit("a", 15, 3)
    assert all_steps(model) == [
        Step(pytest.approx(1.10), (), (), (), (), 10),
        Step(pytest.approx(1.05), ("a",), (0,), (), (), 5),
        Step(pytest.approx(1.10), (), (), ("a",), (), 0),
        Step(pytest.approx(1.10), (), (), ("a",), ("a",), 0),
    ]
    assert (model.num_running, model.num_waiting, model.num_kv_tokens) == (0, 0, 0)
    assert (model.num_steps, model.num_prompt_tokens, model.num_generation_tokens) == (4, 15, 3)


def test_decoding_comes_before_prompts_and_both_share_the_step() -> None:
    model = BatchingModel[str](ROUND)
    model.submit("a", 4, 4)
    model.submit("b", 16, 1)
    assert all_steps(model) == [
        Step(pytest.approx(1.10), ("a",), (0,), (), (), 10),  # 4 tokens of a, 6 of b
        Step(pytest.approx(1.19), (), (), ("a",), (), 9),  # one less: that of a
        Step(pytest.approx(1.11), ("b",), (0,), ("a",), ("b",), 1),
        Step(pytest.approx(1.10), (), (), ("a",), ("a",), 0),
    ]


def test_who_comes_first_begins_first_and_slots_are_all_that_run() -> None:
    model = BatchingModel[str](ROUND)
    for name in "abc":
        model.submit(name, 2, 2)
    step = model.next_step()
    assert step is not None
    assert step.first == ("a", "b")
    assert (model.num_running, model.num_waiting) == (2, 1)
    step = model.next_step()
    assert step is not None
    assert (step.more, step.finished, step.first) == (("a", "b"), ("a", "b"), ())
    step = model.next_step()
    assert step is not None
    assert step.first == ("c",), "slots are free from the step after the one that freed them"


def test_an_answer_of_one_token_ends_with_its_prompt() -> None:
    model = BatchingModel[str](ROUND)
    model.submit("a", 1, 1)
    assert all_steps(model) == [Step(pytest.approx(1.01), ("a",), (0,), (), ("a",), 1)]


def test_an_idle_engine_makes_no_step() -> None:
    model = BatchingModel[str](ROUND)
    assert model.next_step() is None
    assert model.num_steps == 0


@pytest.mark.parametrize(
    "at_step", [0, 1, 2, 3], ids=["waiting", "in its prompt", "at its first token", "later"]
)
def test_who_is_aborted_gets_nothing_more_and_leaves_its_slot(at_step: int) -> None:
    model = BatchingModel[str](replace(ROUND, max_num_seqs=1))
    model.submit("a", 15, 9)
    model.submit("b", 3, 2)
    for _ in range(at_step):
        model.next_step()
    assert model.abort("a")
    assert not model.abort("a")
    steps = all_steps(model)
    assert [step.first for step in steps] == [("b",), ()]
    assert [step.more for step in steps] == [(), ("b",)]
    assert steps[-1].finished == ("b",)
    assert (model.num_running, model.num_kv_tokens) == (0, 0)


def test_a_key_may_be_used_again_after_its_end_or_abort_but_not_before() -> None:
    model = BatchingModel[str](ROUND)
    model.submit("a", 1, 5)
    with pytest.raises(ValueError, match="has not ended"):
        model.submit("a", 1, 1)
    model.next_step()
    with pytest.raises(ValueError, match="has not ended"):
        model.submit("a", 1, 1)
    model.abort("a")
    model.submit("a", 1, 9)
    assert sum(len(step.first) + len(step.more) for step in all_steps(model)) == 9


def test_cached_tokens_are_not_computed_and_their_share_is_exact() -> None:
    model = BatchingModel[str](replace(ROUND, prefix_hit_share=0.25, max_num_seqs=1))
    for number in range(8):
        model.submit(str(number), 5, 1)
    steps = all_steps(model)
    assert [step.num_prefill_tokens + sum(step.num_cached) for step in steps] == [5] * 8
    assert [step.num_cached for step in steps] == [(1,), (1,), (1,), (2,)] * 2
    assert (model.num_prefix_hits, model.num_prompt_tokens) == (10, 40)


def test_of_a_prompt_that_is_cached_whole_one_token_is_computed() -> None:
    model = BatchingModel[str](replace(ROUND, prefix_hit_share=1.0))
    model.submit("a", 8, 1)
    model.submit("b", 1, 1)
    (step,) = all_steps(model)
    assert (step.num_cached, step.num_prefill_tokens) == ((7, 0), 2)


def test_prompts_slow_decoding_down_by_their_length_if_told_so() -> None:
    model = BatchingModel[str](replace(ROUND, decode_slowdown_per_prefill_token=0.5))
    model.submit("a", 1, 2)
    model.next_step()
    model.submit("b", 4, 1)
    step = model.next_step()
    assert step is not None
    assert step.duration_s == pytest.approx(1.0 + 0.1 * (1 + 0.5 * 4) + 0.04)


def test_without_room_for_another_token_the_youngest_is_put_back_and_goes_on_later() -> None:
    model = BatchingModel[str](replace(ROUND, max_kv_tokens=11, max_step_tokens=20))
    model.submit("a", 4, 5)
    model.submit("b", 4, 4)
    steps = all_steps(model)
    # 4 + 4 prompt tokens and two first ones make 10 of 11: the next step has room for one more, not for two.
    assert [(step.first, step.more) for step in steps] == [
        (("a", "b"), ()),
        ((), ("a",)),
        ((), ("a",)),
        ((), ("a",)),
        ((), ("a",)),
        ((), ("b",)),  # recomputed: its prompt and its first token
        ((), ("b",)),
        ((), ("b",)),
    ]
    assert steps[5].num_prefill_tokens == 5
    assert (model.num_preemptions, model.num_prompt_tokens, model.num_kv_tokens) == (1, 8, 0)


def test_who_is_aborted_while_it_is_computed_once_more_gives_back_what_it_holds() -> None:
    model = BatchingModel[str](replace(ROUND, max_kv_tokens=11, max_step_tokens=4))
    model.submit("a", 4, 5)
    model.submit("b", 4, 6)
    while "a" not in (step.finished if (step := model.next_step()) else ()):
        pass
    assert model.num_preemptions == 1
    step = model.next_step()
    assert step is not None
    assert (step.num_prefill_tokens, step.more) == (4, ()), "a part of its prompt and its first tokens"
    model.abort("b")
    assert (model.num_running, model.num_kv_tokens) == (0, 0)


def test_what_could_never_run_is_refused() -> None:
    model = BatchingModel[str](replace(ROUND, max_kv_tokens=10))
    model.submit("fits", 8, 2)
    for num_prompt_tokens, num_output_tokens in ((0, 1), (1, 0), (8, 3)):
        with pytest.raises(ValueError):
            model.submit("never", num_prompt_tokens, num_output_tokens)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_gets_its_tokens_within_the_limits_whatever_comes_between(seed: int) -> None:
    """Conservation, against counts kept beside the model: random sizes, arrivals and aborts."""
    draw = random.Random(seed)
    max_num_seqs = draw.randint(1, 8)
    parameters = BatchingParameters(
        max_num_seqs=max_num_seqs,
        max_step_tokens=draw.randint(max_num_seqs, 64),
        prefix_hit_share=draw.choice([0.0, 0.3, 0.97]),
        max_kv_tokens=draw.choice([None, 60, 200]),
    )
    model = BatchingModel[int](parameters)
    asked: dict[int, tuple[int, int]] = {}
    got: Counter[int] = Counter()
    has_begun, finished, aborted, num_computed = [], set(), set(), 0
    for turn in range(10_000):
        if len(asked) < 60 and draw.random() < 0.3:
            asked[turn] = (draw.randint(1, 40), draw.randint(1, 20))
            model.submit(turn, *asked[turn])
        living = [key for key in asked if key not in finished | aborted]
        if living and draw.random() < 0.1:
            aborted.add(victim := draw.choice(living))
            assert model.abort(victim)
        step = model.next_step()
        if step is None:
            if len(asked) == 60:
                break
            continue
        for key in step.first:
            assert got[key] == 0
        for key in step.more:
            assert got[key] > 0
        tokens = [*step.first, *step.more]
        assert len(set(tokens)) == len(tokens), "a token each"
        assert not aborted.intersection(tokens)
        got.update(tokens)
        has_begun += step.first
        num_computed += step.num_prefill_tokens + sum(step.num_cached)
        finished.update(step.finished)
        assert {key for key in tokens if got[key] == asked[key][1]} == set(step.finished)
        assert model.num_running <= max_num_seqs
        if parameters.max_kv_tokens is None:  # else some of `more` may be of prompts, computed once more
            assert step.num_prefill_tokens + len(step.more) <= parameters.max_step_tokens
        if parameters.max_kv_tokens is not None:
            assert 0 <= model.num_kv_tokens <= parameters.max_kv_tokens
    assert finished | aborted == set(asked)
    assert not finished & aborted
    assert has_begun == sorted(has_begun), "first come, first served"
    assert (model.num_running, model.num_waiting, model.num_kv_tokens) == (0, 0, 0)
    assert model.num_generation_tokens == got.total()
    if not model.num_preemptions and not aborted:
        assert num_computed == model.num_prompt_tokens == sum(prompt for prompt, _ in asked.values())


def lengths(draw: random.Random, mean: float, cv: float) -> int:
    """Lognormal."""
    variance = math.log1p(cv**2)
    return max(1, round(draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))


def test_the_setting_of_the_knee_search_saturates_at_its_rate_with_all_slots_taken() -> None:
    """Prompts of 600 tokens (CV 0.8), answers of 150 (CV 0.7): 64 slots make 64 / 150 requests in a step of
    10 + 64 * 0.12 + 64 / 150 * 600 * 0.03 = 25.4 ms: 16.8 requests/s; 149 of the 150 tokens take a step."""
    draw = random.Random(5)
    model = BatchingModel[int](BatchingParameters())
    clock_s, num_submitted, num_finished = 0.0, 0, 0
    first_finished_s = 0.0
    running: list[int] = []
    while num_finished < 4000:
        while model.num_running + model.num_waiting < 160:
            model.submit(num_submitted, lengths(draw, 600, 0.8), lengths(draw, 150, 0.7))
            num_submitted += 1
        step = model.next_step()
        assert step is not None
        clock_s += step.duration_s
        running.append(model.num_running + len(step.finished))
        if num_finished < 500 <= num_finished + len(step.finished):
            first_finished_s, num_at_first = clock_s, num_finished + len(step.finished)
        num_finished += len(step.finished)
    assert (num_finished - num_at_first) / (clock_s - first_finished_s) == pytest.approx(16.9, rel=0.02)
    assert max(running) == 64
    assert sum(running) / len(running) > 63.5, "a slot is empty only where a long prompt holds up the next"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_base_s", 0.0),
        ("step_base_s", -1.0),
        ("step_base_s", math.nan),
        ("step_per_sequence_s", math.inf),
        ("step_per_prefill_token_s", "fast"),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", True),
        ("max_step_tokens", 63),
        ("prefix_hit_share", 1.01),
        ("decode_slowdown_per_prefill_token", -0.1),
        ("max_kv_tokens", 0),
    ],
)
def test_a_number_that_no_engine_has_is_refused_with_its_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchingParameters(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message
