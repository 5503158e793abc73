"""The default model on CPUs: what a request gets depends on nothing but the request, to the last bit."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

import pytest

from engine_service import LLM, SamplingParams
from shared.config import DEFAULT_MODEL_SOURCE

Told = list[tuple[int, dict[int, float]]]  # each token, and the log-probabilities beside it


def answers(prompts: list[list[int]], *, again: bool = False, **options: Any) -> list[Told]:
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
    with LLM(DEFAULT_MODEL_SOURCE, max_model_len=512, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if again:  # prompts are in the prefix cache now
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert outputs[0].num_cached_tokens == len(prompts[0]) - 1
    found = []
    for output in outputs:
        answer = output.outputs[0]
        assert answer.logprobs is not None
        told = [{token: one.logprob for token, one in each.items()} for each in answer.logprobs]
        found.append(list(zip(answer.token_ids, told, strict=True)))
    return found


@pytest.mark.parametrize(
    "form",
    [{}, {"kv_cache_dtype": "int8"}, {"quantization": "none"}],
    ids=["as-stored", "int8-cache", "float-weights"],
)
def test_company_chunks_threads_and_the_cache_change_no_bit(form: dict[str, Any]) -> None:
    with LLM(DEFAULT_MODEL_SOURCE, max_model_len=512) as llm:
        tokens = llm.get_tokenizer().encode(pydoc_data.topics.topics["assert"] * 2)
    prompts = [tokens[:300], tokens[40:100], tokens[7:9], tokens[:290]]
    together = answers(prompts, **form)
    for number, prompt in enumerate(prompts):
        [alone] = answers([prompt], num_threads=1, max_num_batched_tokens=100, **form)
        assert alone == together[number]
    cached = answers(prompts, again=True, max_num_batched_tokens=33, block_size=20, num_threads=2, **form)
    assert cached == together
