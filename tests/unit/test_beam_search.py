"""Beam search in the engine: the beams of a naive one, at the cost of a token each, whatever else goes on."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from engine_service.fair_share import INPUT_WEIGHT, OUTPUT_WEIGHT, FairShare
from engine_service.fake_runner import FakeModel, digest_of
from engine_service.refusal import Refusal
from engine_service.scheduling_policy import FirstComeFirstServed, SchedulingPolicy
from engine_service.sequence import Sequence
from shared.errors import InvalidRequest
from shared.identifiers import RequestId, TenantId
from shared.messages import Beam, EngineLoad, SequenceUpdate, StepResult, Submit, decode, encode
from shared.sampling import BeamSearch, StructuredOutput
from tests.naive_beam_search import naive_beam_search
from tests.unit.worlds import (
    EOS,
    MODEL,
    World,
    expected_output,
    make_prompt,
    make_sampling,
    make_submit,
    make_world,
)

ENDING = FakeModel(range(900), EOS, eos_every=5)


def expected_beams(submit: Submit, model: FakeModel, max_model_len: int = 200) -> list[Beam]:
    prompt, sampling = submit.prompt_token_ids, submit.sampling
    search = sampling.beam_search
    assert search is not None

    def likeliest(history: list[int], num_tokens: int) -> list[tuple[int, float]]:
        digest = digest_of(history)
        token_id = model.next_token(digest, len(history) - 1, make_sampling())
        return model.logprobs(digest, token_id, num_tokens).top

    return naive_beam_search(
        likeliest,
        prompt,
        width=search.width,
        max_tokens=min(sampling.max_tokens, max_model_len - len(prompt)),
        length_penalty=search.length_penalty,
        end_token_ids={*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))},
    )


def computed_tokens(world: World) -> dict[int, int]:
    """How many tokens were computed of each position."""
    counts: dict[int, int] = {}
    for _, start, num_tokens in itertools.chain.from_iterable(world.runner.steps):
        for position in range(start, start + num_tokens):
            counts[position] = counts.get(position, 0) + 1
    return counts


# ---------------------------------------------------------------------- the same beams


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_search_finds_the_beams_of_a_naive_one_whatever_goes_on_beside_it(seed, async_scheduling):
    print(f"seed {seed}")
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 5])
    model = FakeModel(range(900), EOS, eos_every=rng.choice([0, 4, 9]))
    policies: list[SchedulingPolicy] = [FirstComeFirstServed(), FairShare(lambda: 100.0)]
    world = make_world(
        num_blocks=rng.choice([60, 90, 400]) // block_size,
        block_size=block_size,
        max_num_seqs=rng.choice([2, 5, 20]),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        max_model_len=45,
        enable_prefix_caching=rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([None, 3]),
        force_preemption_every=rng.choice([0, 0, 3]),
        policy=policies[seed % 2],
        model=model,
        async_scheduling=async_scheduling,
    )
    searches, others = [], []
    for number in range(16):
        prompt = make_prompt(rng.randint(1, 30), rng.choice([0, 0, 300]))
        options: dict[str, Any] = {"tenant": rng.choice("ab"), "priority": rng.choice([1, 1, 2])}
        if number % 2:
            others.append(world.add(f"r{number}", prompt, max_tokens=rng.randint(1, 14), **options))
        else:
            options |= {"ignore_eos": rng.random() < 0.2, "stop_token_ids": tuple(range(rng.choice([0, 60])))}
            search = BeamSearch(rng.choice([1, 2, 3, 5]), rng.choice([-1.0, 0.0, 1.0, 2.5]))
            searches.append(
                world.add(f"r{number}", prompt, max_tokens=rng.randint(1, 20), beam_search=search, **options)
            )
        for _ in range(rng.randint(0, 6)):
            world.step()
    world.run()
    world.assert_idle()
    for submit in searches:
        assert world.last_update[submit.request_id].beams == expected_beams(submit, model, 45)
        assert world.output[submit.request_id] == []
    for submit in others:
        output = expected_output(submit, model)[: 45 - len(submit.prompt_token_ids)]
        assert world.output[submit.request_id] == output[: (*output, EOS).index(EOS) + 1]


def test_a_reset_of_the_prefix_cache_in_the_middle_changes_nothing_but_the_cost():
    world = make_world()
    submit = world.add("a", make_prompt(10), max_tokens=12, beam_search=BeamSearch(3))
    while world.engine.has_work:
        world.step()
        if len(world.runner.steps) % 4 == 0:
            world.engine.reset_prefix_cache()
    assert world.last_update["a"].beams == expected_beams(submit, MODEL)


def test_names_may_be_odd():
    world = make_world()
    submits = [
        world.add(name, make_prompt(10, 100 * n), max_tokens=5, beam_search=BeamSearch(3))
        for n, name in enumerate(["", "a.3", ".2", "a"])
    ]
    world.run()
    world.assert_idle()
    for submit in submits:
        assert world.last_update[submit.request_id].beams == expected_beams(submit, MODEL)


def test_beams_are_told_whole_and_their_ends_are_counted():
    world = make_world(model=ENDING)
    submit = world.add("a", make_prompt(10), max_tokens=20, beam_search=BeamSearch(4))
    world.run()
    beams = world.last_update["a"].beams
    assert beams == expected_beams(submit, ENDING)
    assert {beam.finish_reason for beam in beams} == {"stop"}
    assert all(beam.token_ids[-1] == beam.stop_token_id == EOS for beam in beams)
    assert world.last_update["a"].finish_reason == "stop"


def test_many_tokens_that_end_leave_as_many_beams_that_go_on():
    prompt = make_prompt(10)
    likeliest = MODEL.next_token(digest_of(prompt), 9, make_sampling())
    ends = tuple(range(likeliest, likeliest + 6))
    world = make_world()
    # At a power this high a longer result is a better one.
    search = BeamSearch(1, length_penalty=10.0)
    submit = world.add("a", prompt, max_tokens=8, beam_search=search, stop_token_ids=ends)
    world.run()
    (beam,) = world.last_update["a"].beams
    assert beam.token_ids[0] == likeliest + 6
    assert [beam] == expected_beams(submit, MODEL)


@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 3.0])
def test_a_search_ends_when_nothing_can_become_better(length_penalty):
    world = make_world(model=ENDING, num_blocks=500, max_model_len=1000)
    beam_search = BeamSearch(4, length_penalty)
    submit = world.add("a", make_prompt(10), max_tokens=150, beam_search=beam_search)
    world.run()
    assert world.last_update["a"].beams == expected_beams(submit, ENDING, 1000)
    # The sums fall by 0.7 and more with each token. The power of 3 makes a long beam's as good as any.
    assert len(world.runner.steps) < (100 if length_penalty < 3 else 152)


@pytest.mark.parametrize("length_penalty", [-1.0, 1.3, 1.7, 2.5])
@pytest.mark.parametrize("width", [1, 2])
def test_a_search_does_not_end_before_that(width, length_penalty):
    world = make_world(model=ENDING, num_blocks=500)
    submits = [
        world.add(
            f"r{n}", make_prompt(n % 5 + 1, n), max_tokens=30, beam_search=BeamSearch(width, length_penalty)
        )
        for n in range(12)
    ]
    world.run()
    for submit in submits:
        assert world.last_update[submit.request_id].beams == expected_beams(submit, ENDING)


# ---------------------------------------------------------------------- what it costs


@pytest.mark.parametrize(("width", "max_num_seqs"), [(2, 64), (8, 64), (8, 3), (32, 64), (32, 5)])
def test_a_level_costs_one_token_for_each_beam(width, max_num_seqs):
    world = make_world(num_blocks=200, block_size=16, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    world.add("a", make_prompt(37), max_tokens=40, beam_search=BeamSearch(width))
    world.run()
    counts = computed_tokens(world)
    assert [counts[position] for position in range(37)] == [1] * 37
    assert [counts[position] for position in range(37, 76)] == [width] * 39
    assert len(world.runner.steps) == 1 + 39 * -(-width // min(width, max_num_seqs))


def test_searches_on_one_prompt_share_it():
    world = make_world(num_blocks=200, block_size=16, max_num_batched_tokens=64)
    for name in "abc":
        world.add(name, make_prompt(37), max_tokens=10, beam_search=BeamSearch(3))
        world.step()
    world.run()
    assert computed_tokens(world)[20] == 1
    assert world.last_update["a"].beams == world.last_update["c"].beams


def test_a_long_search_leaves_the_cached_prompts_of_others():
    world = make_world(num_blocks=26, block_size=16)
    world.add("other", make_prompt(40, 300), max_tokens=1)
    world.run()
    world.add("a", make_prompt(10), max_tokens=120, beam_search=BeamSearch(2))
    world.run()
    world.add("again", make_prompt(40, 300), max_tokens=1)
    world.step()
    assert world.runner.steps[-1] == [("again", 39, 1)]


# ---------------------------------------------------------------------- what is told meanwhile


def test_one_update_says_that_it_has_begun_and_the_next_has_the_beams():
    world = make_world()
    world.add("other", make_prompt(10), max_tokens=1)
    world.run()
    world.add("a", make_prompt(10), max_tokens=5, beam_search=BeamSearch(3))
    told = [world.step() for _ in range(5)]
    assert told[0] == [SequenceUpdate(RequestId("a"), [], num_cached_tokens=9)]
    assert told[1:4] == [[]] * 3
    (last,) = told[4]
    assert (len(last.beams), last.finish_reason, last.num_cached_tokens) == (3, "length", 0)
    world.assert_idle()


def test_the_update_of_a_single_token_has_all_there_is_to_tell():
    world = make_world()
    world.add("a", make_prompt(10), beam_search=BeamSearch(3), max_tokens=1)
    (update,) = world.step()
    assert [len(beam.token_ids) for beam in update.beams] == [1] * 3
    assert update.finish_reason == "length"


def test_the_timeline_is_that_of_one_request():
    world = make_world(force_preemption_every=2)
    world.add("a", make_prompt(40), max_tokens=6, beam_search=BeamSearch(3))
    timelines = []
    while world.engine.has_work:
        world.clock.now_s += 1
        timelines += world.engine.step().finished
    (timeline,) = timelines
    assert (timeline.request_id, timeline.finish_reason) == ("a", "length")
    assert (timeline.num_prompt_tokens, timeline.num_output_tokens) == (40, 6)
    assert timeline.queued_s < timeline.scheduled_s < timeline.first_token_s < timeline.finished_s
    assert timeline.num_preemptions == world.scheduler.num_preemptions > 0


def test_the_load_counts_the_levels_to_come_and_each_prompt_once():
    world = make_world()
    world.add("a", make_prompt(10), max_tokens=5, beam_search=BeamSearch(3))
    assert world.engine.load().outstanding_tokens == 10 + 3 * 4
    loads = []
    while world.engine.has_work:
        world.step()
        loads.append(world.engine.load())
    assert [load.outstanding_tokens for load in loads] == [12, 9, 6, 3, 0]
    assert [(load.num_running, load.num_waiting) for load in loads] == [(3, 0)] * 4 + [(0, 0)]
    assert (loads[-1].prompt_tokens, loads[-1].generation_tokens) == (10, 1 + 3 * 4)
    assert (loads[-1].prefix_cache_queries, loads[-1].prefix_cache_hits) == (10, 0)


def test_beams_cross_the_wire():
    beams = [Beam([1, 2], -0.5, "stop", 2), Beam([3], -1.0, "length")]
    update = SequenceUpdate(RequestId("a"), [], finish_reason="stop", beams=beams)
    result = StepResult([update], EngineLoad(0, 0, 1, 1, 0))
    assert decode(encode(result)) == result
    submit = make_submit("a", [1], beam_search=BeamSearch(3, 0.5))
    assert decode(encode(submit)) == submit


# ---------------------------------------------------------------------- how it ends otherwise


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("while_computing", [False, True])
def test_an_abort_at_any_moment_leaves_nothing_behind(while_computing, async_scheduling):
    policy = Account()
    world = make_world(policy=policy, max_num_seqs=3, async_scheduling=async_scheduling)
    for moment in range(14):
        other = world.add(f"other{moment}", make_prompt(10), max_tokens=9)
        world.add(f"a{moment}", make_prompt(12), max_tokens=30, beam_search=BeamSearch(4))
        for _ in range(moment):
            world.step()
        if moment % 3 == 0:
            world.engine.reset_prefix_cache()
        if while_computing:
            world.step(aborts=(f"a{moment}",))
        else:
            assert world.abort(f"a{moment}")
        assert not world.abort(f"a{moment}")
        world.run()
        world.assert_idle()
        assert f"a{moment}" not in world.finish_order
        assert world.output[other.request_id] == expected_output(other)
        assert not policy.active


def test_an_abort_is_possible_when_the_cache_has_nothing_of_the_beams():
    world = make_world()
    world.add("a", make_prompt(40), max_tokens=5, beam_search=BeamSearch(3))
    world.step()
    world.engine.reset_prefix_cache()
    world.step()
    assert world.engine.load().num_running == 3
    assert world.abort("a")
    world.assert_idle()


class Account(FirstComeFirstServed[Sequence]):
    """Knows who was added and has not ended, and refuses to hear it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.active: set[RequestId] = set()

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self.active, "added twice"
        self.active.add(sequence.request_id)
        super().add(sequence)

    def ended(self, sequence: Sequence) -> None:
        self.active.remove(sequence.request_id)


def test_a_deadline_ends_all_beams_and_is_told_once():
    for num_steps in range(5):
        world = make_world(max_num_seqs=2)
        world.add("a", make_prompt(10), max_tokens=9, beam_search=BeamSearch(3), timeout_s=5.0)
        for _ in range(num_steps):
            world.step()
        world.clock.now_s += 5
        outcome = world.engine.step()
        assert outcome.updates == [SequenceUpdate(RequestId("a"), [], finish_reason="abort")]
        assert [timeline.finish_reason for timeline in outcome.finished] == ["abort"]
        world.assert_idle()


# ---------------------------------------------------------------------- beside others


def test_a_prompt_is_charged_once_and_each_token_of_each_beam():
    policy = FairShare(lambda: 100.0)
    world = make_world(policy=policy)
    world.add("a", make_prompt(10), max_tokens=5, beam_search=BeamSearch(3))
    world.run()
    assert policy.served(TenantId("acme")) == 10 * INPUT_WEIGHT + (1 + 3 * 4) * OUTPUT_WEIGHT


def test_a_tenant_keeps_its_place_between_two_levels():
    policy = FairShare(lambda: 100.0)
    world = make_world(policy=policy)
    world.add("much", make_prompt(30), max_tokens=60, tenant="served-much")
    for _ in range(20):
        world.step()
    world.add("a", make_prompt(10), max_tokens=5, beam_search=BeamSearch(3))
    begin = policy.served(TenantId("acme"))
    while "a" not in world.finish_order:
        world.step()
    assert policy.served(TenantId("acme")) == begin + 10 * INPUT_WEIGHT + (1 + 3 * 4) * OUTPUT_WEIGHT


def test_levels_pass_the_bounds_of_the_queue_and_take_no_place_in_it():
    world = make_world(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=20)
    submit = world.add("a", make_prompt(15), max_tokens=5, beam_search=BeamSearch(4))
    world.step()
    assert world.engine.load().num_waiting == 3
    for name in "bc":
        world.add(name, make_prompt(10, 300), max_tokens=1)
    with pytest.raises(Refusal, match="2 requests are waiting"):
        world.add("d", [1], max_tokens=1)
    world.run()
    assert world.last_update["a"].beams == expected_beams(submit, MODEL)
    world.assert_idle()


@pytest.mark.parametrize("policy", [FirstComeFirstServed, lambda: FairShare(lambda: 100.0)])
def test_a_search_keeps_the_places_that_it_has_while_others_wait(policy):
    world = make_world(max_num_seqs=3, policy=policy())
    world.add("a", make_prompt(10), max_tokens=10, beam_search=BeamSearch(3))
    for _ in range(3):
        world.step()
    for number in range(6):
        world.add(f"waits{number}", make_prompt(10, 400), max_tokens=10, tenant="other")
    for _ in range(7):
        world.step()
    assert world.finish_order == ["a"]


@pytest.mark.parametrize("policy", [FirstComeFirstServed, lambda: FairShare(lambda: 100.0)])
def test_a_search_grows_into_the_places_that_become_free(policy):
    world = make_world(max_num_seqs=3, policy=policy())
    for number in range(9):
        world.add(f"waits{number}", make_prompt(10, 400), max_tokens=10, tenant="other")
        if number == 1:
            world.add("a", make_prompt(10), max_tokens=20, beam_search=BeamSearch(3))
    while "a" not in world.finish_order:
        world.step()
    assert set(world.finish_order) == {"waits0", "waits1", "a"}


def test_a_search_that_has_yielded_comes_back_before_those_that_wait():
    policy = FairShare(lambda: 100.0)
    world = make_world(max_num_seqs=1, force_preemption_every=2, policy=policy)
    submit = world.add("a", make_prompt(10), max_tokens=10, beam_search=BeamSearch(4))
    for number in range(6):
        world.add(f"waits{number}", make_prompt(10, 400), max_tokens=10, tenant="other")
    world.run()
    assert world.scheduler.num_preemptions > 10
    assert world.finish_order[0] == "a"
    assert world.last_update["a"].beams == expected_beams(submit, MODEL)


def test_a_request_of_a_higher_class_does_not_wait_behind_a_search():
    world = make_world(max_num_seqs=2, policy=FairShare(lambda: 100.0))
    world.add("a", make_prompt(10), max_tokens=10, beam_search=BeamSearch(4), priority=2)
    for _ in range(3):
        world.step()
    world.add("urgent", make_prompt(10, 400), max_tokens=3, priority=0)
    for _ in range(4):
        world.step()
    assert world.finish_order == ["urgent"]
    world.run()
    world.assert_idle()


def test_whoever_decodes_has_a_token_in_each_step_beside_a_search():
    world = make_world(max_num_batched_tokens=16)
    submit = world.add("b", make_prompt(10, 300), max_tokens=30)
    world.step()
    world.add("a", make_prompt(40), max_tokens=20, beam_search=BeamSearch(8))
    for num_tokens in range(2, 31):
        world.step()
        assert len(world.output["b"]) == num_tokens
    assert world.output["b"] == expected_output(submit)
    world.run()


def test_a_search_has_its_tokens_in_each_step_beside_a_long_prompt():
    world = make_world(num_blocks=100, max_num_batched_tokens=16)
    world.add("a", make_prompt(10), max_tokens=12, beam_search=BeamSearch(3))
    world.step()
    world.add("long", make_prompt(180, 300), max_tokens=1)
    for _ in range(11):
        world.step()
    assert world.finish_order == ["a"]
    world.run()
    world.assert_idle()


# ---------------------------------------------------------------------- what is refused

NOT_HEEDED: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {1: 1.0},
    "min_tokens": 1,
    "structured_output": StructuredOutput("json_object"),
    "logprobs": 0,
    "allowed_token_ids": (1,),
    "bad_words": ((1,),),
    "prompt_logprobs": 0,
}
HEEDED: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 7,
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "top_k": -1,
}


@pytest.mark.parametrize("name", NOT_HEEDED)
def test_what_a_search_would_ignore_is_refused_by_name(name):
    sampling = make_sampling(beam_search=BeamSearch(2), **{name: NOT_HEEDED[name]})
    with pytest.raises(InvalidRequest) as refused:
        sampling.check(1000)
    assert refused.value.param == name


def test_every_parameter_is_heeded_or_refused():
    make_sampling(beam_search=BeamSearch(2), **HEEDED).check(1000)
    assert {*NOT_HEEDED, *HEEDED, "max_tokens", "beam_search"} == {
        field.name for field in msgspec.structs.fields(type(make_sampling()))
    }


@pytest.mark.parametrize(
    ("search", "param"),
    [
        (BeamSearch(0), "beam_width"),
        (BeamSearch(33), "beam_width"),
        (BeamSearch(2, 11.0), "length_penalty"),
        (BeamSearch(2, float("nan")), "length_penalty"),
    ],
)
def test_a_search_that_cannot_be_is_refused(search, param):
    world = make_world()
    with pytest.raises(Refusal) as refused:
        world.add("a", make_prompt(10), beam_search=search)
    assert refused.value.param == param
    world.assert_idle()


def test_a_search_is_refused_that_could_never_end_and_one_that_has_begun_elsewhere():
    world = make_world(num_blocks=4)
    with pytest.raises(Refusal, match="KV blocks"):
        world.add("a", make_prompt(10), max_tokens=10, beam_search=BeamSearch(3))
    with pytest.raises(Refusal, match="cannot be continued"):
        world.add("a", make_prompt(3), output=[1], beam_search=BeamSearch(3))
    world.assert_idle()
