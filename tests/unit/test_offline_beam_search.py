"""LLM.beam_search: what a naive search finds, of the fake model and of a tiny one with weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from engine_service.fake_runner import FakeModel, digest_of
from shared.messages import Beam
from shared.sampling import SamplingParams as EngineParams
from tests.models import EOS_TOKEN_ID, write_tiny_llama
from tests.naive_beam_search import naive_beam_search

END = 256
ENDING = FakeModel(eos_every=9)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("fake:eos_every=9", max_num_seqs=5, max_queued_requests=2, max_model_len=64) as llm:
        yield llm


def expected_beams(prompt: str, max_tokens: int, width: int, **options: Any) -> list[Beam]:
    def likeliest(history: list[int], num_tokens: int) -> list[tuple[int, float]]:
        digest = digest_of(history)
        greedy = EngineParams(max_tokens, 0, temperature=0.0)
        token_id = ENDING.next_token(digest, len(history) - 1, greedy)
        return ENDING.logprobs(digest, token_id, num_tokens).top

    options = {"end_token_ids": [END], **options}
    return naive_beam_search(likeliest, list(prompt.encode()), width=width, max_tokens=max_tokens, **options)


def check(output: BeamSearchOutput, prompt: str, beams: list[Beam]) -> None:
    assert [sequence.tokens for sequence in output.sequences] == [
        [*prompt.encode(), *beam.token_ids] for beam in beams
    ]
    for sequence, beam in zip(output.sequences, beams, strict=True):
        text = bytes(token_id for token_id in beam.token_ids if token_id != END).decode()
        assert sequence.text == prompt + text + "<|end|>" * (beam.finish_reason == "stop")
        assert sequence.cum_logprob == beam.cumulative_logprob
        assert (sequence.finish_reason, sequence.stop_reason) == (beam.finish_reason, None)


def test_all_prompts_are_searched_for_beside_others_and_beyond_the_queue_bound(llm):
    prompts = [f"prompt {number}" for number in range(12)]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=15))
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output, prompt, expected_beams(prompt, 15, 3))
    assert {s.finish_reason for output in outputs for s in output.sequences} == {"stop", "length"}


def test_the_parameters_are_those_of_the_search(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=3.0, ignore_eos=True, temperature=1)
    beams = expected_beams("water", 12, 4, length_penalty=3.0, end_token_ids=[])
    [output] = llm.beam_search({"prompt": "water"}, params)
    assert [sequence.tokens[5:] for sequence in output.sequences] == [beam.token_ids for beam in beams]


def test_a_search_is_cut_to_the_room_there_is(llm):
    [output] = llm.beam_search("water", BeamSearchParams(beam_width=2, max_tokens=1000, ignore_eos=True))
    assert {len(sequence.tokens) for sequence in output.sequences} == {64}


def test_a_bar_counts_the_tokens_of_the_beams(llm, capsys):
    llm.beam_search("water", BeamSearchParams(beam_width=2, max_tokens=5), use_tqdm=True)
    assert "0.0 tokens/s" not in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 33}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("inf")}, "length_penalty"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(fields, named):
    with pytest.raises(ValueError, match=named):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **fields})


def test_other_parameters_and_wrong_prompts_are_refused(llm):
    with pytest.raises(TypeError, match="BeamSearchParams"):
        llm.beam_search("water", SamplingParams())
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        llm.beam_search(["water", "x" * 64], BeamSearchParams(beam_width=2, max_tokens=5))


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"enable_prefix_caching": False}])
def test_a_model_with_weights_finds_the_beams_of_a_search_over_transformers(tmp_path: Path, options):
    model = write_tiny_llama(tmp_path, seed=3)

    @torch.inference_mode()
    def likeliest(history: list[int], num_tokens: int) -> list[tuple[int, float]]:
        logprobs = model(torch.tensor([history])).logits[0, -1].double().log_softmax(-1)
        top = logprobs.topk(num_tokens)
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    prompts = [[5, 90, 17, 200, 33, 8, 41], list(range(40, 60))]
    params = BeamSearchParams(beam_width=4, max_tokens=16)
    exact = {"kv_cache_dtype": "float32", **options}
    with LLM(str(tmp_path), block_size=8, num_gpu_blocks_override=40, max_num_seqs=6, **exact) as llm:
        outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        beams = naive_beam_search(likeliest, prompt, width=4, max_tokens=16, end_token_ids=[EOS_TOKEN_ID])
        assert [sequence.tokens for sequence in output.sequences] == [
            prompt + beam.token_ids for beam in beams
        ]
        assert [sequence.cum_logprob for sequence in output.sequences] == pytest.approx(
            [beam.cumulative_logprob for beam in beams], abs=1e-3
        )
