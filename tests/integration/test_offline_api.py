"""The offline classes on the real model: what an engine gives that is driven by hand."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_service import LLM, AsyncLLM, SamplingParams
from engine_service.main import load_served_model
from engine_service.served_model import build_engine
from shared.config import DEFAULT_MODEL_SOURCE, ModelConfig
from shared.identifiers import RequestId, TenantId
from shared.messages import Submit
from shared.sampling import SamplingParams as EngineParams
from shared.tokenizer import Tokenizer

OPTIONS = {"max_model_len": 256, "num_gpu_blocks_override": 128, "num_threads": 2}
PROMPTS = ["The capital of France is", "Water flows", "Once upon a time there was a mill"]
CONVERSATION = [{"role": "user", "content": "Name a river."}]
DOCUMENT = Path(__file__).parents[2] / "docs" / "OFFLINE.md"
SEED, TEMPERATURE, MAX_TOKENS = 7, 0.8, 16


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL_SOURCE, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[list[int]], Tokenizer]:
    """The tokens of the prompts and of the conversation, behind one another, and what tells their text."""
    config = ModelConfig(name="by-hand", source=DEFAULT_MODEL_SOURCE, **OPTIONS)
    served = load_served_model(config)
    tokenizer = Tokenizer(served.text_bundle)
    engine = build_engine(config, served)
    sampling = EngineParams(max_tokens=MAX_TOKENS, seed=SEED, temperature=TEMPERATURE)
    outputs = []
    for batch in ([tokenizer.encode(text) for text in PROMPTS], [tokenizer.encode_chat(CONVERSATION)]):
        of_batch: dict[str, list[int]] = {str(number): [] for number in range(len(batch))}
        for number, prompt in enumerate(batch):
            engine.add(Submit(RequestId(str(number)), prompt, sampling, TenantId("test")))
        while engine.has_work:
            for update in engine.step().updates:
                of_batch[update.request_id] += update.new_token_ids
        outputs += of_batch.values()
    engine.close()
    return outputs, tokenizer


def test_generate_and_chat_give_what_the_engine_gives(llm, by_hand):
    token_ids, tokenizer = by_hand
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=SEED, temperature=TEMPERATURE, logprobs=3)
    outputs = llm.generate(PROMPTS, params) + llm.chat(CONVERSATION, params)
    assert [output.outputs[0].token_ids for output in outputs] == token_ids
    for output in outputs:
        [choice] = output.outputs
        assert choice.finish_reason in ("stop", "length")
        shown = choice.token_ids[:-1] if choice.finish_reason == "stop" else choice.token_ids
        # The text goes on where the prompt ends, so a space that begins it is kept.
        assert choice.text.strip() == tokenizer.decode(shown).strip()
        assert len(choice.logprobs) == len(choice.token_ids)
        assert choice.cumulative_logprob < 0


def test_a_stop_string_cuts_the_text_of_the_real_model(llm):
    greedy = {"temperature": 0.0, "max_tokens": 24}
    [whole] = llm.generate(PROMPTS[0], SamplingParams(**greedy))[0].outputs
    stop = whole.text[10:14]
    at = whole.text.find(stop)
    [cut] = llm.generate(PROMPTS[0], SamplingParams(**greedy, stop=stop))[0].outputs
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:at], "stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


async def test_streams_end_with_what_the_engine_gives(by_hand):
    token_ids, _ = by_hand
    llm = AsyncLLM(DEFAULT_MODEL_SOURCE, **OPTIONS)
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=SEED, temperature=TEMPERATURE)

    async def last(prompt: str) -> list[int]:
        *_, output = [output async for output in llm.generate(prompt, params, prompt)]
        return output.outputs[0].token_ids

    try:
        assert await asyncio.gather(*(last(prompt) for prompt in PROMPTS)) == token_ids[: len(PROMPTS)]
    finally:
        llm.shutdown()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_examples_of_the_document_run_and_end(number):
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    ended = subprocess.run([sys.executable, "-c", examples[number]], capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout.decode().strip()


_FORK = """
import os
from engine_service import LLM, SamplingParams

llm = LLM("fake:", max_model_len=64)
if (child := os.fork()) == 0:
    try:
        llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_process_is_told_that_the_engine_is_in_its_parent() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=60, check=True
    )
    assert "fork" in result.stdout
