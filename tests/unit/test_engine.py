"""The engine: what it refuses, deadlines, load, and the timeline of a request."""

from __future__ import annotations

import math

import pytest

from engine_service.refusal import Refusal
from shared.identifiers import RequestId
from shared.messages import Submit
from tests.unit.worlds import VOCAB_SIZE, expected_output, make_prompt, make_submit, make_world


@pytest.mark.parametrize(
    ("submit", "param"),
    [
        (make_submit("r", []), "prompt"),
        (make_submit("r", [1, VOCAB_SIZE]), "prompt"),
        (make_submit("r", [-1]), "prompt"),
        (make_submit("r", [2**63]), "prompt"),
        (make_submit("r", [1], output=[VOCAB_SIZE]), "output_token_ids"),
        (make_submit("r", [1], timeout_s=math.nan), "timeout_s"),
        (make_submit("r", [1], max_tokens=0), "max_tokens"),
        (make_submit("r", [1], temperature=math.nan), "temperature"),
        (make_submit("r", [1], logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_its_field(submit: Submit, param: str) -> None:
    world = make_world()
    with pytest.raises(Refusal) as refusal:
        world.engine.add(submit)
    assert refusal.value.code == "invalid_request"
    assert refusal.value.param == param
    assert not world.engine.has_work


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    world = make_world()
    submit = world.add("r", make_prompt(5))
    world.step()
    with pytest.raises(Refusal):
        world.engine.add(make_submit("r", make_prompt(7)))
    world.run()
    assert world.output["r"] == expected_output(submit)


def test_a_request_whose_deadline_passed_in_the_queue_costs_no_step() -> None:
    world = make_world(max_num_seqs=1)
    world.add("running", make_prompt(3), max_tokens=5)
    world.add("late", make_prompt(3, start=300), timeout_s=2.0)
    world.step()
    world.clock.now_s += 3.0
    world.run()
    assert world.last_update["late"].finish_reason == "abort"
    assert not any(row[0] == "late" for step in world.runner.steps for row in step)
    assert len(world.output["running"]) == 5
    world.assert_idle()


def test_a_running_request_ends_at_its_deadline() -> None:
    world = make_world()
    world.add("r", make_prompt(3), max_tokens=50, timeout_s=2.0)
    world.step()
    world.clock.now_s += 2.0
    (update,) = world.step()
    assert update.finish_reason == "abort"
    assert update.new_token_ids == []
    world.assert_idle()


def test_every_step_makes_progress_while_work_is_queued() -> None:
    world = make_world(num_blocks=6, block_size=4, max_num_seqs=4)
    for number in range(10):
        world.add(f"r{number}", make_prompt(1 + 2 * number, start=80 * number), max_tokens=3)
    while world.engine.has_work:
        before = world.engine.load()
        world.step()
        assert world.engine.load().num_steps == before.num_steps + 1
    world.assert_idle()


def test_load_counts_what_is_there_and_what_is_still_to_do() -> None:
    world = make_world(max_num_seqs=1, block_size=4, num_blocks=10)
    world.add("a", make_prompt(5), max_tokens=3)
    world.add("b", make_prompt(6), max_tokens=2)
    assert world.engine.load().outstanding_tokens == (5 + 2) + (6 + 1)
    world.step()
    load = world.engine.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert load.num_free_blocks == 8
    assert load.outstanding_tokens == 2 + 7
    world.run()
    load = world.engine.load()
    assert load.outstanding_tokens == 0
    assert (load.prompt_tokens, load.generation_tokens) == (11, 5)
    assert load.num_free_blocks == load.num_blocks == 10


def test_the_first_update_tells_how_much_of_the_prompt_was_cached() -> None:
    world = make_world(block_size=4)
    world.add("first", make_prompt(10))
    world.run()
    world.add("second", make_prompt(10), max_tokens=2)
    assert [update.num_cached_tokens for _ in range(2) for update in world.step()] == [9, 0]


def test_a_timeline_has_the_moments_of_a_request_in_order() -> None:
    world = make_world(max_num_batched_tokens=4)
    world.add("r", make_prompt(6), max_tokens=2, trace_context={"traceparent": "x"})
    finished = []
    for _ in range(3):
        world.clock.now_s += 1.0
        finished += world.engine.step().finished
    (timeline,) = finished
    assert timeline.trace_context == {"traceparent": "x"}
    assert (timeline.queued_s, timeline.scheduled_s, timeline.first_token_s) == (100.0, 101.0, 102.0)
    assert timeline.finished_s == 103.0
    assert (timeline.num_prompt_tokens, timeline.num_output_tokens) == (6, 2)
    assert timeline.finish_reason == "length"


def test_aborts_that_arrive_while_the_model_computes_get_no_more_tokens() -> None:
    world = make_world()
    world.add("r", make_prompt(3), max_tokens=50)
    world.step()
    outcome = world.engine.step(lambda: [RequestId("r"), RequestId("r"), RequestId("unknown")])
    assert outcome.updates == []
    assert [timeline.finish_reason for timeline in outcome.finished] == ["abort"]
    world.assert_idle()
