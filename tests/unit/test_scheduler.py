"""The scheduler, one story each. The fake model fails at once on a wrong block, position or cache hit."""

from __future__ import annotations

import pytest

from engine_service.fake_runner import FakeModel
from engine_service.refusal import Refusal
from tests.unit.worlds import EOS, World, expected_output, make_prompt, make_world


def rows_of(world: World, name: str) -> list[tuple[int, int]]:
    """(start, number of tokens) of each row that the request had."""
    return [(start, count) for step in world.runner.steps for who, start, count in step if who == name]


# ---------------------------------------------------------------------- budget and order


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    world = make_world(max_num_batched_tokens=8)
    submit = world.add("r", make_prompt(20), max_tokens=2)
    world.run()
    assert rows_of(world, "r") == [(0, 8), (8, 8), (16, 4), (20, 1)]
    assert world.output["r"] == expected_output(submit)
    world.assert_idle()


def test_running_sequences_decode_in_every_step_while_prompts_keep_coming() -> None:
    world = make_world(max_num_batched_tokens=8, num_blocks=200)
    world.add("steady", make_prompt(4), max_tokens=30)
    for number in range(30):
        world.add(f"prompt{number}", make_prompt(8, start=10 * number), max_tokens=1)
        world.step()
    assert len(world.output["steady"]) == 30


def test_one_step_mixes_decoding_and_a_chunk_of_a_prompt() -> None:
    world = make_world(max_num_batched_tokens=8)
    world.add("old", make_prompt(4))
    world.step()
    world.add("new", make_prompt(20, start=500))
    world.step()
    assert world.runner.steps[-1] == [("old", 4, 1), ("new", 0, 7)]


def test_a_prompt_that_the_next_step_takes_whole_is_not_begun_in_part() -> None:
    world = make_world(max_num_batched_tokens=16, num_blocks=200)
    world.add("decodes", make_prompt(4), max_tokens=9)
    world.step()
    for number in range(3):
        world.add(f"r{number}", make_prompt(10, start=100 * (number + 1)), max_tokens=3)
    for _ in range(3):
        world.step()
    assert world.runner.steps[1:4] == [
        [("decodes", 4, 1), ("r0", 0, 10)],
        [("decodes", 5, 1), ("r0", 10, 1), ("r1", 0, 10)],
        [("decodes", 6, 1), ("r0", 11, 1), ("r1", 10, 1), ("r2", 0, 10)],
    ]


def test_a_prompt_behind_one_in_chunks_is_begun_in_part() -> None:
    world = make_world(max_num_batched_tokens=16, num_blocks=200, long_prefill_token_threshold=10)
    world.add("long", make_prompt(40), max_tokens=1)
    world.add("short", make_prompt(10, start=500), max_tokens=1)
    world.step()
    assert [row[0] for row in world.runner.steps[0]] == ["long", "short"]


def test_first_come_first_served() -> None:
    world = make_world(max_num_seqs=2)
    for number in range(6):
        world.add(f"r{number}", make_prompt(5, start=100 * number), max_tokens=3)
    world.run()
    assert world.finish_order == [f"r{number}" for number in range(6)]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_room() -> None:
    world = make_world(num_blocks=10, max_num_batched_tokens=64)
    world.add("running", make_prompt(16), max_tokens=8)
    world.step()
    world.add("large", make_prompt(30, start=100), max_tokens=2)
    world.add("small", make_prompt(2, start=200), max_tokens=2)
    world.step()
    assert [row[0] for row in world.runner.steps[-1]] == ["running"]
    world.run()
    assert world.finish_order[0] == "running"
    assert set(world.finish_order) == {"running", "large", "small"}


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    world = make_world(max_num_seqs=3)
    for number in range(8):
        world.add(f"r{number}", make_prompt(3, start=50 * number))
    world.run()
    assert max(len(step) for step in world.runner.steps) == 3


# ---------------------------------------------------------------------- prefix cache


def test_a_second_request_starts_after_the_tokens_it_shares() -> None:
    world = make_world(block_size=4)
    world.add("first", make_prompt(11))
    world.run()
    world.add("second", [*make_prompt(10), 700, 701])
    world.run()
    assert rows_of(world, "second")[0] == (10, 2)  # two blocks, and a copy of the third's beginning
    assert world.engine.load().prefix_cache_hits == 10
    assert world.engine.load().prefix_cache_queries == 23


@pytest.mark.parametrize("length", [8, 9, 10, 11, 12])
@pytest.mark.parametrize("block_size", [1, 4])
def test_only_the_last_token_is_computed_if_all_of_the_prompt_is_cached(length: int, block_size: int) -> None:
    world = make_world(block_size=block_size)
    world.add("first", make_prompt(length))
    world.run()
    world.add("second", make_prompt(length))
    world.run()
    assert rows_of(world, "second")[0] == (length - 1, 1)
    assert world.output["second"] == world.output["first"]
    world.assert_idle()


def test_a_block_that_is_shared_is_copied_before_it_is_written() -> None:
    """Both go on in the middle of one block, each in its own way, while the other is running."""
    world = make_world(block_size=4)
    leader = world.add("leader", make_prompt(10), max_tokens=9)
    world.step()
    followers = [
        world.add(name, make_prompt(10), max_tokens=9, seed=seed, temperature=1.0)
        for seed, name in enumerate(("one", "two"))
    ]
    world.run()
    assert [rows_of(world, name)[0] for name in ("one", "two")] == [(9, 1), (9, 1)]
    assert world.output["one"] != world.output["two"]
    for submit in (leader, *followers):
        assert world.output[submit.request_id] == expected_output(submit)
    world.assert_idle()


def test_a_conversation_goes_on_behind_its_last_token() -> None:
    world = make_world(block_size=4)
    world.add("turn 1", make_prompt(10), max_tokens=4)
    world.run()
    turn_2 = [*make_prompt(10), *world.output["turn 1"], 800, 801]
    world.add("turn 2", turn_2)
    world.run()
    assert rows_of(world, "turn 2")[0] == (13, 3)  # the last token of an answer is never computed


def test_choices_of_one_request_wait_for_its_prompt_and_share_it() -> None:
    world = make_world(block_size=4, max_num_batched_tokens=8)
    names = ["first", "second", "third"]
    submits = [
        world.add(
            name,
            make_prompt(19),
            seed=number,
            temperature=1.0,
            shares_prompt_with="first" if number else None,
        )
        for number, name in enumerate(names)
    ]
    world.run()
    assert rows_of(world, "first")[:3] == [(0, 8), (8, 8), (16, 3)]
    assert rows_of(world, "second")[0] == rows_of(world, "third")[0] == (18, 1)
    assert world.runner.steps[3][1:] == [("second", 18, 1), ("third", 18, 1)]
    assert [world.output[name] for name in names] == [expected_output(submit) for submit in submits]
    world.assert_idle()


@pytest.mark.parametrize("ends", ["abort", "expiry"])
def test_choices_whose_first_one_ends_early_are_run_all_the_same(ends: str) -> None:
    world = make_world(block_size=4, max_num_batched_tokens=8)
    world.add("first", make_prompt(19), timeout_s=1.0)
    second = world.add("second", make_prompt(19), shares_prompt_with="first")
    world.add("third", make_prompt(19), shares_prompt_with="first")
    world.step()
    assert world.abort("third")
    if ends == "abort":
        assert world.abort("first")
    else:
        world.clock.now_s += 2.0
    world.run()
    assert world.output["second"] == expected_output(second)
    world.assert_idle()


def test_a_prompt_that_ends_with_a_full_block_leaves_that_block_too() -> None:
    world = make_world(block_size=4)
    world.add("first", make_prompt(8))
    world.run()
    world.add("longer", make_prompt(12))
    world.run()
    assert rows_of(world, "longer")[0] == (8, 4)


def test_sequences_of_one_step_share_a_common_prefix() -> None:
    world = make_world(block_size=4)
    first = world.add("first", make_prompt(10))
    world.add("second", make_prompt(10))
    world.step()
    assert world.runner.steps == [[("first", 0, 10), ("second", 8, 2)]]
    world.run()
    assert world.output["first"] == world.output["second"] == expected_output(first)
    world.assert_idle()


def test_a_prefix_is_shared_only_as_far_as_the_step_computes_it() -> None:
    world = make_world(block_size=4, max_num_batched_tokens=12, long_prefill_token_threshold=6)
    first = world.add("first", make_prompt(30))
    world.add("second", make_prompt(30))
    world.step()
    assert world.runner.steps == [[("first", 0, 4), ("second", 4, 4)]]
    world.run()
    assert world.output["first"] == world.output["second"] == expected_output(first)


def test_prompts_that_are_alike_are_computed_once_by_turns() -> None:
    world = make_world(block_size=4, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    names = [f"r{number}" for number in range(3)]
    submits = [world.add(name, make_prompt(100), seed=number) for number, name in enumerate(names)]
    world.run()
    num_computed = sum(num_tokens for step in world.runner.steps for _, _, num_tokens in step)
    assert num_computed <= 100 + 2 * 4 + 3 * 4  # the last block of each, and the decoding
    assert [world.output[name] for name in names] == [expected_output(submit) for submit in submits]
    world.assert_idle()


def test_requests_with_different_salts_share_nothing() -> None:
    world = make_world(block_size=4)
    world.add("first", make_prompt(10), cache_salt="a")
    world.run()
    world.add("second", make_prompt(10), cache_salt="b")
    world.run()
    assert rows_of(world, "second")[0] == (0, 10)


def test_the_cache_changes_nothing_but_the_work() -> None:
    outputs, computed = [], []
    for enable_prefix_caching in (True, False):
        world = make_world(enable_prefix_caching=enable_prefix_caching, num_blocks=30)
        for number in range(12):
            world.add(f"r{number}", make_prompt(20 + number % 4), max_tokens=6, temperature=1.0, seed=number)
            world.step()
        world.run()
        world.assert_idle()
        outputs.append(world.output)
        computed.append(sum(count for step in world.runner.steps for _, _, count in step))
    assert outputs[0] == outputs[1]
    assert computed[0] < computed[1] / 2


# ---------------------------------------------------------------------- preemption


def test_two_requests_that_outgrow_the_pool_both_finish_with_the_tokens_of_a_large_pool() -> None:
    world = make_world(num_blocks=8, block_size=4)
    submits = [
        world.add(name, make_prompt(9, start=start), max_tokens=14) for name, start in (("a", 0), ("b", 300))
    ]
    world.run()
    assert world.engine.load().num_preemptions > 0
    for submit in submits:
        assert world.output[submit.request_id] == expected_output(submit)
    world.assert_idle()


def test_the_newest_running_sequence_yields_and_is_the_next_to_run_again() -> None:
    world = make_world(num_blocks=8, block_size=4, max_num_seqs=2)
    world.add("old", make_prompt(11), max_tokens=12)
    world.add("new", make_prompt(11, start=300), max_tokens=12)
    world.add("waiting", make_prompt(3, start=600), max_tokens=2)
    while world.engine.load().num_preemptions == 0:
        world.step()
    assert world.sequence("new").num_computed_tokens == 0
    num_steps = len(world.runner.steps)
    world.run()
    order_after = [name for step in world.runner.steps[num_steps:] for name, _, _ in step]
    assert order_after.index("new") < order_after.index("waiting")


def test_nobody_is_admitted_into_the_block_that_a_running_sequence_needs_next() -> None:
    world = make_world(num_blocks=4, block_size=4)
    world.add("running", make_prompt(11), max_tokens=6)
    world.step()
    world.add("small", make_prompt(2, start=300), max_tokens=2)
    world.run()
    assert world.engine.load().num_preemptions == 0
    assert world.finish_order == ["running", "small"]


def test_a_preempted_request_looks_the_cache_up_again() -> None:
    """LMCache #1969: block size 16, 7 blocks, two prompts of 34 tokens, 35 new tokens each."""
    world = make_world(num_blocks=7, block_size=16, max_num_batched_tokens=128)
    submits = [
        world.add(name, make_prompt(34, start=start), max_tokens=35) for name, start in (("a", 0), ("b", 300))
    ]
    world.run()
    assert world.engine.load().num_preemptions >= 1
    restart = [start for start, count in rows_of(world, "b") if count > 1][1]
    assert restart >= 32
    assert restart % 16 == 0
    for submit in submits:
        assert world.output[submit.request_id] == expected_output(submit)


def test_preemption_between_the_chunks_of_a_prompt_poisons_no_later_request() -> None:
    world = make_world(block_size=4, max_num_batched_tokens=6, force_preemption_every=2)
    first = world.add("first", make_prompt(30), max_tokens=5)
    world.run()
    assert world.engine.load().num_preemptions > 2
    world.add("again", make_prompt(30), max_tokens=5)
    world.run()
    assert world.output["first"] == world.output["again"] == expected_output(first)
    world.assert_idle()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_forced_preemption_ends(every: int, enable_prefix_caching: bool) -> None:
    world = make_world(
        max_num_batched_tokens=5, force_preemption_every=every, enable_prefix_caching=enable_prefix_caching
    )
    submits = [world.add(f"r{number}", make_prompt(17, start=number), max_tokens=6) for number in range(4)]
    world.run()
    for submit in submits:
        assert world.output[submit.request_id] == expected_output(submit)
    world.assert_idle()


def test_the_same_request_alone_and_in_company_gets_the_same_tokens() -> None:
    alone = make_world()
    request = {"max_tokens": 12, "temperature": 0.8, "seed": 77}
    alone.add("r", make_prompt(7), **request)
    alone.run()
    crowd = make_world(num_blocks=14, max_num_batched_tokens=9, force_preemption_every=4)
    for number in range(5):
        crowd.add(f"before{number}", make_prompt(6, start=40 * number), max_tokens=3 + number, seed=number)
    crowd.add("r", make_prompt(7), **request)
    for number in range(5):
        crowd.step()
        crowd.add(f"after{number}", make_prompt(7), max_tokens=2 + number, temperature=0.8, seed=number)
    crowd.run()
    assert crowd.output["r"] == alone.output["r"]


# ---------------------------------------------------------------------- what can never run


def test_a_prompt_that_no_pool_of_this_size_holds_is_refused_alone() -> None:
    world = make_world(num_blocks=2, block_size=4)
    with pytest.raises(Refusal) as refusal:
        world.add("three blocks", make_prompt(12), max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"
    world.add("fits", make_prompt(7), max_tokens=2)
    world.run()
    world.assert_idle()


def test_a_request_that_would_outgrow_the_whole_pool_is_refused_alone() -> None:
    world = make_world(num_blocks=2, block_size=4)
    with pytest.raises(Refusal) as refusal:
        world.add("grows to three blocks", make_prompt(8), max_tokens=2)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "max_tokens"
    world.add("fills it exactly", make_prompt(8), max_tokens=1)
    world.add("as well", make_prompt(5, start=300), max_tokens=4)
    world.run()
    assert len(world.output["as well"]) == 4
    world.assert_idle()


def test_a_prompt_without_room_for_one_token_of_output_is_refused() -> None:
    world = make_world(max_model_len=10)
    with pytest.raises(Refusal) as refusal:
        world.add("r", make_prompt(10), max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "prompt"


def test_a_sequence_ends_at_max_model_len() -> None:
    world = make_world(max_model_len=12)
    world.add("r", make_prompt(9), max_tokens=50)
    world.run()
    assert len(world.output["r"]) == 3
    assert world.last_update["r"].finish_reason == "length"


def test_a_full_queue_refuses_the_next_and_keeps_the_others() -> None:
    world = make_world(max_queued_requests=2)
    world.add("a", make_prompt(3))
    world.add("b", make_prompt(3))
    with pytest.raises(Refusal) as refusal:
        world.add("c", make_prompt(3))
    assert refusal.value.code == "queue_full"
    world.run()
    assert world.finish_order == ["a", "b"]


# ---------------------------------------------------------------------- ends


def test_an_end_of_sequence_token_stops_and_is_part_of_the_output() -> None:
    world = make_world(model=FakeModel(token_ids=range(900), eos_token_id=EOS, eos_every=3))
    world.add("r", make_prompt(5), max_tokens=50)
    world.run()
    assert world.output["r"][-1] == EOS
    assert world.output["r"].count(EOS) == 1
    assert world.last_update["r"].finish_reason == "stop"
    assert world.last_update["r"].stop_token_id == EOS


def test_ignore_eos_and_min_tokens_go_past_it() -> None:
    world = make_world(model=FakeModel(token_ids=range(900), eos_token_id=EOS, eos_every=2))
    world.add("ignores", make_prompt(5), max_tokens=30, ignore_eos=True)
    world.add("at least", make_prompt(5), max_tokens=30, min_tokens=20)
    world.run()
    assert len(world.output["ignores"]) == 30
    assert EOS in world.output["ignores"]
    assert len(world.output["at least"]) >= 20
    assert world.last_update["at least"].finish_reason == "stop"


def test_a_stop_token_of_the_request_stops() -> None:
    undisturbed = expected_output(make_world().add("r", make_prompt(5), max_tokens=10))
    world = make_world()
    world.add("r", make_prompt(5), max_tokens=10, stop_token_ids=(undisturbed[4],))
    world.run()
    assert world.output["r"] == undisturbed[: undisturbed.index(undisturbed[4]) + 1]
    assert world.last_update["r"].stop_token_id == undisturbed[4]


def test_a_continuation_goes_on_where_the_other_engine_stopped() -> None:
    whole = expected_output(make_world().add("r", make_prompt(9), max_tokens=10, temperature=1.0, seed=5))
    world = make_world()
    world.add("r", make_prompt(9), max_tokens=10, temperature=1.0, seed=5, output=whole[:4])
    world.run()
    assert world.output["r"] == whole[4:]
    with pytest.raises(Refusal, match="generated already"):
        world.add("done", make_prompt(9), max_tokens=10, output=whole)


# ---------------------------------------------------------------------- aborts


def aborted_worlds() -> list[str]:
    return [f"{when} {step}" for step in range(7) for when in ("before", "during")]


@pytest.mark.parametrize("moment", aborted_worlds())
def test_an_abort_at_any_moment_frees_everything_once(moment: str) -> None:
    """A run of two chunks and five decode steps, beside a neighbour that must not notice."""
    when, step = moment.split()
    world = make_world(max_num_batched_tokens=8)
    neighbour = world.add("neighbour", make_prompt(3, start=500), max_tokens=9)
    world.step()
    submit = world.add("r", make_prompt(12), max_tokens=6)
    for number in range(7):
        if number == int(step) and when == "before":
            assert world.abort("r")
        world.step(aborts=("r",) if number == int(step) and when == "during" else ())
    assert not world.abort("r")
    assert "r" not in world.finish_order
    assert world.output["r"] == expected_output(submit)[: len(world.output["r"])]
    world.run()
    assert world.output["neighbour"] == expected_output(neighbour)
    world.assert_idle()


def test_an_abort_between_plan_and_update_drops_the_row_only() -> None:
    world = make_world()
    world.add("a", make_prompt(5))
    world.add("b", make_prompt(5, start=300))
    plan = world.scheduler.schedule()
    assert plan is not None
    sampled = world.runner.execute(world.runner.prepare(plan))
    assert world.scheduler.abort(plan.rows[0].sequence.request_id) is not None
    grown = world.scheduler.update(plan, sampled)
    world.scheduler.check()
    assert [sequence.request_id for sequence, _ in grown] == ["b"]


def test_a_sequence_that_waits_after_preemption_can_be_aborted() -> None:
    world = make_world(num_blocks=8, block_size=4)
    world.add("old", make_prompt(11), max_tokens=12)
    world.add("new", make_prompt(11, start=300), max_tokens=12)
    while world.engine.load().num_preemptions == 0:
        world.step()
    assert world.abort("new")
    world.run()
    world.assert_idle()
