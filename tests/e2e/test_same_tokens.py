"""Whatever company a prompt has, and however its blocks are cached, split or taken away: same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from engine_service.compute_thread import ComputeThread
from engine_service.engine import Engine
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_runner import ModelRunner, use_threads
from engine_service.served_model import ServedModel, build_engine
from engine_service.step_execution import OverlappedExecution, StepExecution
from shared.config import DEFAULT_MODEL_NAME, default_model
from shared.identifiers import RequestId, TenantId
from shared.messages import Submit
from shared.sampling import SamplingParams
from shared.tokenizer import Tokenizer
from tests.e2e.prompts import PROMPTS
from tests.e2e.reference import TIE, Reference, generate_alone, verified
from tests.http_client import send
from tests.stack import Stack

MAX_TOKENS = 24
EXACT_MODEL = default_model().model_copy(
    update={"activation_dtype": "int16"}
)  # as near to transformers as can be
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0)


@dataclass(frozen=True)
class World:
    loaded: LoadedModel
    tokenizer: Tokenizer
    transformers_model: Any
    references: list[Reference]


@pytest.fixture(scope="module")
def world(transformers_model: Any) -> World:
    use_threads(2)
    loaded = load_model(EXACT_MODEL)
    tokenizer = Tokenizer(loaded.text_bundle)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    outputs = run_all_at_once(make_engine(loaded, enable_prefix_caching=False), prompts)
    return World(loaded, tokenizer, transformers_model, verified(transformers_model, prompts, outputs))


def make_engine(
    loaded: LoadedModel,
    *,
    execution: StepExecution | None = None,
    force_preemption_every: int = 0,
    **changes: Any,
) -> Engine:
    config = EXACT_MODEL.model_copy(update={"max_model_len": 512, "num_gpu_blocks_override": 1024, **changes})
    runner = ModelRunner(config, loaded, num_threads=2)
    served = ServedModel(runner, runner.model_card, runner.text_bundle)
    return build_engine(config, served, execution=execution, force_preemption_every=force_preemption_every)


def run_all_at_once(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add(Submit(RequestId(str(number)), prompt, GREEDY, TenantId("test")))
    while engine.has_work:
        for update in engine.step().updates:
            outputs[update.request_id] += update.new_token_ids
        engine.check()
    assert engine.load().num_free_blocks == engine.load().num_blocks
    return list(outputs.values())


def assert_same(references: list[Reference], outputs: list[list[int]]) -> None:
    num_ties = sum(
        reference.parts_at_a_tie(output) for reference, output in zip(references, outputs, strict=True)
    )
    print(f"{num_ties} of {len(outputs)} outputs part where the top two logits are within 1e-4")


@pytest.mark.parametrize("prompts", [slice(1), pytest.param(slice(1, 5), marks=pytest.mark.soak)])
def test_the_reference_is_what_transformers_generates(world, prompts):
    eos = world.loaded.text_bundle.eos_token_ids
    for reference in world.references[prompts]:
        reference.parts_at_a_tie(generate_alone(world.transformers_model, reference.prompt, MAX_TOKENS, eos))


@pytest.mark.parametrize(
    ("caching", "budget"), [(True, 32), (False, 2048)], ids=["cache-chunks", "no-cache-whole-prompts"]
)
def test_32_prompts_at_once_equal_each_one_alone(world, caching, budget):
    engine = make_engine(world.loaded, enable_prefix_caching=caching, max_num_batched_tokens=budget)
    prompts = [reference.prompt for reference in world.references]
    assert_same(world.references, run_all_at_once(engine, prompts))
    if caching:  # once more: now every prompt is found in the cache, up to its last block
        hits_before = engine.load().prefix_cache_hits
        assert_same(world.references[:8], run_all_at_once(engine, prompts[:8]))
        assert engine.load().prefix_cache_hits - hits_before >= 8 * 16


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap-cache", "no-overlap-no-cache"])
def test_preemption_changes_no_token(world, overlaps):
    engine = make_engine(
        world.loaded,
        execution=OverlappedExecution(ComputeThread()) if overlaps else None,
        force_preemption_every=4,  # beside those that the pool brings about
        enable_prefix_caching=overlaps,
        max_num_batched_tokens=256,
        max_model_len=216,
        block_size=4,  # small blocks: every sequence wants another one every four tokens
        num_gpu_blocks_override=56,
    )
    references = world.references[:12]
    assert_same(references, run_all_at_once(engine, [reference.prompt for reference in references]))
    engine.close()
    print(f"{engine.load().num_preemptions} preemptions")
    assert engine.load().num_preemptions >= 10


def test_the_whole_stack_gives_the_same_text(world, redis_url):
    model = EXACT_MODEL.model_copy(update={"engines": 2, "num_threads": 1})
    with Stack(redis_url, {"models": [model.model_dump()]}) as stack:
        key = stack.key()

        def ask(text: str) -> tuple[str, str]:
            answer = send(
                stack.url,
                "POST",
                "/v1/chat/completions",
                {
                    "model": DEFAULT_MODEL_NAME,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": MAX_TOKENS,
                    "temperature": 0,
                },
                key=key,
                timeout_s=120,
            )
            assert answer.status == 200, answer.data
            return answer.json["choices"][0]["message"]["content"], answer.headers["x-headrace-engine"]

        with ThreadPoolExecutor(32) as threads:
            answers = list(threads.map(ask, PROMPTS))
        load = [engine["load"] for engine in stack.admin_status()["engines"]]
    assert len({engine for _, engine in answers}) == 2
    assert load
    num_ties = 0
    for reference, (text, _) in zip(world.references, answers, strict=True):
        num_ties += text_parts_at_a_tie(world.tokenizer, reference, text)
    print(f"{num_ties} of {len(answers)} answers part where the top two logits are within 1e-4")


def text_parts_at_a_tie(tokenizer: Tokenizer, reference: Reference, text: str) -> bool:
    """As `Reference.parts_at_a_tie`, for an answer of which only the text is known."""
    if text == tokenizer.decode(reference.output):
        return False
    ties = [at for at, gap in enumerate(reference.gaps) if gap < TIE]
    assert any(text.startswith(tokenizer.decode(reference.output[:at])) for at in ties), text
    return True
