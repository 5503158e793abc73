"""Log-probabilities of a prompt: each once, in order, whatever chunks, cache and preemptions do."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service import prompt_tokens
from engine_service.engine import Engine
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_runner import ModelRunner
from engine_service.models import transformers_module
from engine_service.raw_logprobs import logprobs_of, look_up_on_device
from engine_service.served_model import ServedModel, build_engine
from shared.config import ModelConfig
from shared.identifiers import RequestId, TenantId
from shared.messages import (
    EngineLoad,
    SequenceUpdate,
    StepResult,
    Submit,
    TokenLogprobs,
    decode,
    encode,
)
from shared.sampling import SamplingParams
from tests.models import write_tiny_llama, write_tiny_model
from tests.unit.worlds import MODEL, World, expected_output, make_prompt, make_world

LENGTH = 21  # of the prompts; blocks have 4 tokens


def starts_of(world: World, name: str) -> list[int]:
    """Where each row of a request began."""
    return [start for step in world.runner.steps for request, start, _ in step if request == name]


# -------------------------------------------------------------------------- the fake model's worlds


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("force_preemption_every", [0, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 4, 6, 64])
def test_the_same_prompt_twice_is_told_the_same_twice(
    chunk: int, force_preemption_every: int, async_scheduling: bool
) -> None:
    """vLLM #8268, #3251, #13105: cached tokens have no logits, and chunks shift the positions."""
    world = make_world(
        max_num_batched_tokens=chunk,
        force_preemption_every=force_preemption_every,
        async_scheduling=async_scheduling,
    )
    prompt = make_prompt(LENGTH)
    for name in ("first", "second"):
        submit = world.add(name, prompt, prompt_logprobs=3, max_tokens=5)
        world.run()
        assert world.prompt_logprobs[name] == MODEL.score_prompt(prompt, 3)
        assert world.output[name] == expected_output(submit)
        assert starts_of(world, name)[0] == 0
    assert [one.token_id for one in world.prompt_logprobs["first"]] == prompt[1:]
    assert (world.engine.load().num_preemptions > 0) == bool(force_preemption_every)
    world.assert_idle()


def test_they_are_told_once_with_the_first_token() -> None:
    world = make_world(max_num_batched_tokens=6)
    world.add("a", make_prompt(LENGTH), prompt_logprobs=0, max_tokens=4)
    updates = [update for _ in range(10) for update in world.step()]
    assert [len(update.prompt_logprobs) for update in updates] == [LENGTH - 1, 0, 0, 0]
    assert all(one.top == [] for one in updates[0].prompt_logprobs)


def test_a_scored_prompt_does_not_read_the_cache_but_fills_it() -> None:
    world = make_world()
    prompt = make_prompt(LENGTH)
    world.add("scored", prompt, prompt_logprobs=1, max_tokens=1)
    world.run()
    world.add("plain", prompt, max_tokens=1)
    world.run()
    assert starts_of(world, "plain") == [20]
    world.add("scored again", prompt, prompt_logprobs=1, max_tokens=1)
    world.run()
    assert starts_of(world, "scored again") == [0]
    assert world.last_update["scored again"].num_cached_tokens == 0
    load = world.engine.load()  # tokens that were never looked up would lower the hit rate
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (LENGTH, 20)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlap"])
def test_a_prompt_that_is_half_computed_does_not_skip_what_another_has_cached(async_scheduling: bool) -> None:
    world = make_world(max_num_batched_tokens=8, async_scheduling=async_scheduling)
    prompt = make_prompt(LENGTH)
    for name in ("plain", "scored", "scored too"):
        options: dict[str, Any] = {} if name == "plain" else {"prompt_logprobs": 2}
        world.add(name, prompt, max_tokens=3, **options)
    world.run()
    assert world.prompt_logprobs["scored"] == MODEL.score_prompt(prompt, 2)
    assert world.prompt_logprobs["scored too"] == MODEL.score_prompt(prompt, 2)
    assert world.prompt_logprobs["plain"] == []
    world.assert_idle()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlap"])
def test_a_preemption_after_they_were_told_may_read_the_cache_again(async_scheduling: bool) -> None:
    world = make_world(async_scheduling=async_scheduling)
    prompt = make_prompt(LENGTH)
    submit = world.add("a", prompt, prompt_logprobs=1, max_tokens=12)
    while len(world.output["a"]) < 6:
        world.step()
    world.scheduler._preempt(world.sequence("a"))
    num_rows = len(starts_of(world, "a"))
    world.run()
    assert starts_of(world, "a")[num_rows] >= 20
    assert world.prompt_logprobs["a"] == MODEL.score_prompt(prompt, 1)
    assert world.output["a"] == expected_output(submit)
    world.assert_idle()


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlap"])
def test_a_preemption_at_any_chunk_starts_over_and_tells_nothing_twice(
    num_steps: int, async_scheduling: bool
) -> None:
    world = make_world(max_num_batched_tokens=5, async_scheduling=async_scheduling)
    prompt = make_prompt(LENGTH)
    world.add("a", prompt, prompt_logprobs=2, max_tokens=6)
    for _ in range(num_steps):
        world.step()
    world.scheduler._preempt(world.sequence("a"))
    world.run()
    assert world.prompt_logprobs["a"] == MODEL.score_prompt(prompt, 2)
    world.assert_idle()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlap"])
def test_only_the_first_of_several_choices_computes_the_prompt(async_scheduling: bool) -> None:
    world = make_world(max_num_batched_tokens=6, async_scheduling=async_scheduling, force_preemption_every=4)
    prompt = make_prompt(LENGTH)
    world.add("first", prompt, prompt_logprobs=1, temperature=1.0, seed=1)
    for number in (2, 3):
        world.add(f"choice {number}", prompt, temperature=1.0, seed=number, shares_prompt_with="first")
    world.run()
    assert world.prompt_logprobs["first"] == MODEL.score_prompt(prompt, 1)
    assert world.prompt_logprobs["choice 2"] == []
    assert starts_of(world, "choice 2")[0] >= 20
    assert len({tuple(tokens) for tokens in world.output.values()}) == 3
    world.assert_idle()


def test_an_abort_between_chunks_leaves_the_neighbour_as_it_is() -> None:
    for async_scheduling in (False, True):
        world = make_world(max_num_batched_tokens=10, async_scheduling=async_scheduling)
        prompt = make_prompt(LENGTH, start=300)
        world.add("leaves", make_prompt(LENGTH), prompt_logprobs=1)
        world.add("stays", prompt, prompt_logprobs=1)
        world.step()
        world.step(aborts=("leaves",))
        world.run()
        assert world.prompt_logprobs["leaves"] == []
        assert world.prompt_logprobs["stays"] == MODEL.score_prompt(prompt, 1)
        world.assert_idle()


@pytest.mark.parametrize("chunk", [4, 9, 64])
def test_a_continuation_tells_of_its_prompt_and_not_of_its_output(chunk: int) -> None:
    world = make_world(max_num_batched_tokens=chunk)
    prompt = make_prompt(LENGTH)
    output = MODEL.generate(prompt, 7, SamplingParams(max_tokens=9, seed=1, temperature=0.0))
    world.add("a", prompt, output=output, prompt_logprobs=2, max_tokens=9)
    world.run()
    assert world.prompt_logprobs["a"] == MODEL.score_prompt(prompt, 2)


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    world = make_world()
    for _ in range(2):
        world.add("a", [7], prompt_logprobs=5)
        world.run()
        assert world.prompt_logprobs["a"] == []
    world.assert_idle()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlap"])
def test_random_company_changes_nothing(seed: int, async_scheduling: bool) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = make_world(
        num_blocks=24,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([5, 12, 40]),
        max_model_len=60,
        long_prefill_token_threshold=rng.choice([None, 3]),
        force_preemption_every=rng.choice([0, 3]),
        async_scheduling=async_scheduling,
    )
    asked: dict[str, tuple[list[int], int | None]] = {}
    for number in range(40):
        prompt = make_prompt(rng.randint(1, 40), rng.choice([0, 0, 300]))
        asked[f"r{number}"] = prompt, rng.choice([None, 0, 1, 4])
        world.add(f"r{number}", prompt, prompt_logprobs=asked[f"r{number}"][1], max_tokens=rng.randint(1, 9))
        if number % 9 == 8:
            world.abort(f"r{rng.randrange(number)}")
        for _ in range(rng.randint(0, 3)):
            world.step()
    world.run()
    assert len(world.finish_order) > 30
    for name in world.finish_order:
        prompt, num_top = asked[name]
        expected = [] if num_top is None else MODEL.score_prompt(prompt, num_top)
        assert world.prompt_logprobs[name] == expected, name
    world.assert_idle()


def test_they_cross_the_wire() -> None:
    update = SequenceUpdate(RequestId("a"), [4], prompt_logprobs=[TokenLogprobs(4, -0.25, 2, [(9, -0.125)])])
    load = EngineLoad(0, 0, 0, 0, 0)
    assert decode(encode(StepResult([update], load))) == StepResult([update], load)


# -------------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    path = tmp_path_factory.mktemp("llama")
    model = write_tiny_llama(path)
    return load_model(config_for(path)), model


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of logits at once, so that small prompts have several parts."""
    monkeypatch.setattr(prompt_tokens, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(transformers_module, "MAX_LOGIT_ROWS", 8)


def config_for(path: Path | str, **changes: Any) -> ModelConfig:
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,
        "num_threads": 1,
        "kv_cache_dtype": "float32",
    }
    return ModelConfig(name="tiny", source=str(path), **(options | changes))


def engine_of(loaded: LoadedModel, **options: Any) -> Engine:
    config = config_for("unused", **options)
    runner = ModelRunner(config, loaded, num_threads=1)
    return build_engine(config, ServedModel(runner, runner.model_card, runner.text_bundle))


def told_of(engine: Engine, *prompts: list[int], num_top: int) -> list[list[TokenLogprobs]]:
    """All prompts at once, with a neighbour that asks for nothing."""
    found: dict[str, list[TokenLogprobs]] = {"neighbour": []}
    sampling = SamplingParams(max_tokens=2, seed=1, temperature=0.0)
    engine.add(Submit(RequestId("neighbour"), [5, 6, 7, 8], sampling, TenantId("t")))
    for index, prompt in enumerate(prompts):
        found[str(index)] = []
        sampling = SamplingParams(max_tokens=2, seed=1, temperature=0.0, prompt_logprobs=num_top)
        engine.add(Submit(RequestId(str(index)), prompt, sampling, TenantId("t")))
    while engine.has_work:
        for update in engine.step().updates:
            found[update.request_id] += update.prompt_logprobs
    assert found.pop("neighbour") == []
    return list(found.values())


@torch.inference_mode()
def assert_equal_to_softmax(model: Any, prompt: list[int], told: list[TokenLogprobs], num_top: int) -> None:
    expected = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    assert [one.token_id for one in told] == prompt[1:]
    for row, one in zip(expected, told, strict=True):
        assert abs(one.logprob - row[one.token_id].item()) < 1e-4
        assert one.rank == int((row > row[one.token_id]).sum()) + 1
        best = row.topk(num_top)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def random_prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("chunk", [4, 7, 512])
def test_a_real_model_s_are_those_of_a_full_softmax(llama: tuple[LoadedModel, Any], chunk: int) -> None:
    loaded, model = llama
    engine = engine_of(loaded, max_num_batched_tokens=chunk)
    prompts = random_prompts(model.config.vocab_size, 50, 18, 2)
    first = told_of(engine, *prompts, num_top=4)
    second = told_of(engine, *prompts, num_top=4)
    for prompt, told, again in zip(prompts, first, second, strict=True):
        assert_equal_to_softmax(model, prompt, told, 4)
        assert all(math.isfinite(logprob) for one in again for _, logprob in one.top)
        assert [one.logprob for one in again] == pytest.approx([one.logprob for one in told], abs=1e-4)
    engine.check()


@pytest.mark.usefixtures("small_parts")
def test_a_module_of_transformers_tells_the_same_in_several_passes(tmp_path: Path) -> None:
    model = write_tiny_model(
        tmp_path,
        "CohereForCausalLM",  # which scales its logits behind the output projection
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    [prompt] = random_prompts(model.config.vocab_size, 40)
    engine = engine_of(load_model(config_for(tmp_path)), max_num_batched_tokens=24)
    for _ in range(2):
        [told] = told_of(engine, prompt, num_top=3)
        assert_equal_to_softmax(model, prompt, told, 3)


def test_nobody_who_does_not_ask_pays(
    llama: tuple[LoadedModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more logits than rows that sample."""
    loaded, _ = llama
    engine = engine_of(loaded)
    model = engine._runner._model  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward_in_parts", lambda *_: pytest.fail("nobody asked for logits"))
    sampling = SamplingParams(max_tokens=3, seed=1, logprobs=5)
    engine.add(Submit(RequestId("a"), [5, 6, 7], sampling, TenantId("t")))
    while engine.has_work:
        engine.step()


def test_rows_with_different_wishes_share_one_look_up() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)) * 3
    token_ids, nums_top = [0, 100, 250, 499], [0, 20, 3, 1]
    told = list(logprobs_of(logits, token_ids, nums_top))
    expected = list(look_up_on_device(logits, token_ids, 20))
    for one, other, num_top in zip(told, expected, nums_top, strict=True):
        assert (one.rank, [token for token, _ in one.top]) == (other.rank, other.top_ids[:num_top])
        assert one.logprob == pytest.approx(other.chosen, abs=1e-5)
