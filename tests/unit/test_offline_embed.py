"""LLM.embed: texts in, vectors out, with names of vLLM's. On the fake model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine_service import (
    LLM,
    AsyncLLM,
    EmbeddingRequestOutput,
    EngineFailedError,
    PoolingParams,
    SamplingParams,
)
from engine_service.fake_embedder import FakeEmbedder
from shared.errors import ConfigError

FAKE = FakeEmbedder(8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("fake:", runner="pooling", max_model_len=50, max_num_seqs=3, is_matryoshka=True) as llm:
        yield llm


def assert_vector(output: EmbeddingRequestOutput, text: str) -> None:
    np.testing.assert_array_equal(np.float32(output.outputs.embedding), FAKE.vector(text.encode()))


def test_vectors_are_in_the_order_of_the_prompts_also_over_several_passes(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    outputs = llm.embed(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_vector(output, prompt)
        assert output.prompt_token_ids == list(prompt.encode())
        assert output.outputs.hidden_size == 8
        assert output.finished
    assert len({output.request_id for output in outputs}) == 20


def test_every_form_of_a_prompt_is_understood(llm: LLM) -> None:
    token_ids = list(b"hi")
    for prompts in (
        "hi",
        token_ids,
        {"prompt": "hi"},
        ["hi"],
        [token_ids],
        [{"prompt_token_ids": token_ids}],
    ):
        [output] = llm.embed(prompts, use_tqdm=False)
        assert_vector(output, "hi")
    assert llm.embed([], use_tqdm=False) == []


def test_dimensions_shorten_the_vectors(llm: LLM) -> None:
    [output] = llm.embed("hi", pooling_params=PoolingParams(dimensions=2), use_tqdm=False)
    whole = FAKE.vector(b"hi")[:2]
    np.testing.assert_allclose(output.outputs.embedding, whole / np.linalg.norm(whole), rtol=1e-6)
    with pytest.raises(ValueError, match="dimensions"):
        llm.embed("hi", pooling_params=PoolingParams(dimensions=9), use_tqdm=False)
    with pytest.raises(ValueError, match="dimensions"):
        PoolingParams(dimensions=0)


def test_threads_share_a_model(llm: LLM) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.embed, [f"{n} {m}" for m in range(9)], use_tqdm=False) for n in range(8)]
        for n, call in enumerate(calls):
            for m, output in enumerate(call.result()):
                assert_vector(output, f"{n} {m}")


@pytest.mark.parametrize(
    ("prompt", "error", "complaint"),
    [
        ("", ValueError, r"prompts\[1\]: the text has no tokens"),
        ("x" * 51, ValueError, r"prompts\[1\]: the text has 51 tokens"),
        ([999], ValueError, r"prompts\[1\]: a token id"),
        ({"promt": "x"}, ValueError, r"prompts\[1\]"),
        (7, TypeError, r"prompts\[1\]"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(
    llm: LLM, prompt: object, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        llm.embed(["good", prompt], use_tqdm=False)  # type: ignore[list-item]


def test_each_kind_of_model_refuses_what_the_other_does(llm: LLM) -> None:
    with pytest.raises(ValueError, match="embed"):
        llm.generate("hi", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match="embed"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    with LLM("fake:") as writer, pytest.raises(ValueError, match='runner="pooling"'):
        writer.embed("hi", use_tqdm=False)
    with pytest.raises(ConfigError, match="AsyncLLM") as caught:
        AsyncLLM("fake:", runner="pooling")
    assert caught.value.param == "runner"


def test_a_pass_that_fails_and_a_model_that_was_shut_down_raise() -> None:
    with LLM("fake:die_at_step=2", runner="pooling") as llm:
        assert_vector(llm.embed("hi", use_tqdm=False)[0], "hi")
        with pytest.raises(EngineFailedError, match="told to fail"):
            llm.embed("hi", use_tqdm=False)
    with pytest.raises(EngineFailedError, match="shut down"):
        llm.embed("hi", use_tqdm=False)
