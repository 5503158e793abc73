"""What a simulated engine can be told, and how it is told what is wrong with that."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from loadtest.simulator.answer import Answer
from loadtest.simulator.knobs import SimulatorKnobs, knobs_of_source, meanings, parse_knobs
from loadtest.simulator.process import run_simulated_engine
from loadtest.simulator.stalls import Stalls
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.identifiers import EngineId, RequestId, TenantId
from shared.messages import SequenceUpdate, Submit
from shared.sampling import SamplingParams


def test_a_source_sets_what_it_names_and_leaves_the_rest() -> None:
    assert knobs_of_source("sim:") == SimulatorKnobs()
    knobs = knobs_of_source("sim:step_base_ms=2.5, tokens_per_message=4,stall_s=2,stall_after_requests=10")
    assert knobs == SimulatorKnobs(step_base_ms=2.5, tokens_per_message=4, stall_s=2, stall_after_requests=10)
    assert isinstance(knobs.tokens_per_message, int)


def test_the_defaults_are_the_setting_of_the_knee_search() -> None:
    parameters = SimulatorKnobs().batching(64, None)
    assert (parameters.step_base_s, parameters.step_per_sequence_s) == pytest.approx((0.010, 0.00012))
    assert parameters.step_per_prefill_token_s == pytest.approx(0.00003)
    assert (parameters.max_num_seqs, parameters.max_step_tokens) == (64, 2048)


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("step_base=1", "step_base_ms"),  # the nearest one
        ("colour=1", "colour"),
        ("step_base_ms=fast", "step_base_ms"),
        ("step_base_ms", "step_base_ms"),
        ("step_base_ms=0", "step_base_ms"),
        ("step_base_ms=nan", "step_base_ms"),
        ("ttft_floor_ms=-1", "ttft_floor_ms"),
        ("tokens_per_message=1.5", "tokens_per_message"),
        ("tokens_per_message=0", "tokens_per_message"),
        ("prefix_hit_share=1.5", "prefix_hit_share"),
        ("itl_jitter=2", "itl_jitter"),
        ("undeclared_hit_points=101", "undeclared_hit_points"),
        ("reject_share=0.6,abort_share=0.5", "abort_share"),
        ("seed=1,seed=2", "seed"),
        ("stall_s=1", "stall_after_requests"),
        ("stall_at_s=1", "stall_at_s"),
        ("stall_s=1,stall_at_s=1,stall_every_s=3", "stall_every_s"),
        ("stall_s=3,stall_every_s=3", "stall_every_s"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(assignment: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_knobs(assignment.split(","))


def test_every_knob_has_a_meaning_for_the_help() -> None:
    assert [name for name, _, _ in meanings()] == [knob.name for knob in fields(SimulatorKnobs)]
    assert all(meaning for _, _, meaning in meanings())


def test_a_stall_begins_as_the_request_of_its_number_comes_and_never_again() -> None:
    stalls = Stalls(SimulatorKnobs(stall_s=2, stall_after_requests=3))
    begins = []
    for number in range(1, 8):
        stalls.note_request(10.0 * number)
        if stalls.next_s < math.inf:
            begins.append(stalls.next_s)
            stalls.begin()
    assert begins == [30.0]


def test_stalls_count_from_the_first_request_and_may_come_again() -> None:
    once = Stalls(SimulatorKnobs(stall_s=1, stall_at_s=5))
    again = Stalls(SimulatorKnobs(stall_s=1, stall_every_s=5))
    for stalls in (once, again):
        assert stalls.next_s == math.inf
        stalls.note_request(100.0)
        stalls.note_request(101.0)
        assert stalls.next_s == 105.0
        stalls.begin()
    assert once.next_s == math.inf
    assert again.next_s == 110.0


def an_answer(
    num_output_tokens: int, *, tokens_per_message: int = 1, is_aborted: bool = False, already: int = 0
) -> Answer:
    submit = Submit(
        RequestId("r"),
        [65, 66],
        SamplingParams(max_tokens=num_output_tokens + already, seed=3),
        TenantId("acme"),
        output_token_ids=[120] * already,
    )
    return Answer(
        b"gateway",
        submit,
        num_output_tokens,
        now_s=0.0,
        tokens_per_message=tokens_per_message,
        is_aborted=is_aborted,
    )


def all_updates(answer: Answer) -> list[SequenceUpdate]:
    updates = []
    while not answer.has_ended:
        if (update := answer.take_token()) is not None:
            updates.append(update)
    return updates


def text_of(updates: list[SequenceUpdate]) -> bytes:
    return bytes(token for update in updates for token in update.new_token_ids)


def test_the_first_token_is_not_kept_back_and_the_last_ones_are_sent_with_the_end() -> None:
    updates = all_updates(an_answer(11, tokens_per_message=4))
    assert [len(update.new_token_ids) for update in updates] == [1, 4, 4, 2]
    assert [update.finish_reason for update in updates] == [None, None, None, "length"]


def test_the_text_is_the_same_in_any_messages_and_where_it_is_continued() -> None:
    whole = text_of(all_updates(an_answer(40)))
    assert len(whole) == 40
    assert whole == text_of(all_updates(an_answer(40, tokens_per_message=7)))
    assert whole[15:] == text_of(all_updates(an_answer(25, already=15)))
    assert whole.decode().isprintable()


@pytest.mark.parametrize(("num_asked", "num_told"), [(10, 5), (3, 1), (1, 1)])
def test_an_aborted_answer_ends_half_way(num_asked: int, num_told: int) -> None:
    updates = all_updates(an_answer(num_asked, is_aborted=True))
    assert len(text_of(updates)) == num_told
    assert updates[-1].finish_reason == "abort"


@pytest.mark.parametrize(
    ("field", "value"),
    [("lora", "adapter"), ("quantization", "int8"), ("runner", "pooling"), ("target_itl_ms", 50)],
)
def test_what_only_a_real_engine_can_be_told_is_refused_before_anything_starts(
    field: str, value: str
) -> None:
    config = ModelConfig.model_validate({"name": "m", "source": "sim:", field: value})
    with pytest.raises(ConfigError) as caught:
        run_simulated_engine(
            config,
            SimulatorKnobs(),
            engine_id=EngineId("m-0"),
            bind="tcp://127.0.0.1:0",
            redis_url="redis://127.0.0.1:1",
            namespace="nobody",
        )
    assert caught.value.param == field
