"""The runner around a tiny random model: steps, sizes of the cache, and what is refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.free_memory import available_bytes, container_headroom_bytes
from engine_service.kv_cache import allocate_kv_cache, bytes_per_block, copy_blocks, plan_num_blocks
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.main import load_served_embedder, load_served_model
from engine_service.model_runner import ModelRunner
from engine_service.openmp import bound_openmp_spinning
from engine_service.runner import Runner
from engine_service.sequence import BlockCopy, BlockId
from kernels.cpu.operators import CpuOperators
from shared.config import ModelConfig, parse_config
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.hand_scheduling import make_sequence, run_step, run_to_end
from tests.models import EOS_TOKEN_ID, write_tiny_llama, write_tiny_model

BLOCKS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(config_for(directory))


def config_for(source: Path | str, **changes: Any) -> ModelConfig:
    return ModelConfig(
        **(
            {
                "name": "tiny",
                "source": str(source),
                "max_num_seqs": 8,
                "num_gpu_blocks_override": 64,
                "kv_cache_dtype": "float32",
            }
            | changes
        )
    )


def runner_for(loaded: LoadedModel, *, back_end: str | None = None, **changes: Any) -> ModelRunner:
    return ModelRunner(config_for("unused", **changes), loaded, num_threads=1, back_end=back_end)


def outputs(runner: Runner[Any], *, chunk: int, together: bool = True, **params: Any) -> list[list[int]]:
    """20 tokens after each of four prompts of different lengths."""
    sequences = [
        make_sequence(
            index,
            [3 + (index * 7 + position) % 200 for position in range(length)],
            SamplingParams(**({"max_tokens": 20, "seed": index} | params)),
            num_blocks=BLOCKS,
        )
        for index, length in enumerate((1, 16, 17, 50))
    ]
    for batch in [sequences] if together else [[sequence] for sequence in sequences]:
        run_to_end(runner, batch, num_tokens=20, chunk=chunk)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_tokens_do_not_depend_on_batch_chunks_page_size_or_back_end(
    loaded: LoadedModel, params: dict[str, Any]
) -> None:
    expected = outputs(runner_for(loaded, back_end="reference"), chunk=100, together=False, **params)
    assert len({tuple(output) for output in expected}) == 4
    assert outputs(runner_for(loaded), chunk=100, **params) == expected
    assert outputs(runner_for(loaded), chunk=5, **params) == expected
    small_pages = runner_for(loaded, block_size=10, num_gpu_blocks_override=100)
    assert outputs(small_pages, chunk=5, **params) == expected


def test_rows_that_do_not_reach_their_last_token_sample_nothing(loaded: LoadedModel) -> None:
    runner = runner_for(loaded)
    params = SamplingParams(max_tokens=4, seed=0, temperature=0.0)
    first = make_sequence(0, [5, 6, 7, 8, 9], params, num_blocks=BLOCKS)
    second = make_sequence(1, [5, 6, 7], params, num_blocks=BLOCKS)
    results = run_step(runner, (first, 0, 4), (second, 0, 3))
    assert results[0] is None
    assert results[1] is not None
    assert run_step(runner, (second, 0, 2)) == [None]


def test_log_probabilities_are_the_same_after_a_preemption(loaded: LoadedModel) -> None:
    """Decoded token by token, or all keys and values computed anew in one chunk."""
    runner = runner_for(loaded)
    params = SamplingParams(max_tokens=12, seed=3, temperature=0.9, repetition_penalty=1.2, logprobs=4)
    sequence = make_sequence(0, list(range(3, 20)), params, num_blocks=BLOCKS)
    while sequence.num_output_tokens < 12:
        num_missing = sequence.num_tokens - sequence.num_computed_tokens
        [decoded] = run_step(runner, (sequence, sequence.num_computed_tokens, num_missing))
        num_tokens = sequence.num_tokens
        [anew] = run_step(runner, (sequence, 0, num_tokens))
        assert decoded is not None
        assert anew is not None
        assert decoded.logprobs is not None
        assert anew.logprobs is not None
        assert anew.token_id == decoded.token_id
        assert anew.logprobs.rank == decoded.logprobs.rank
        assert anew.logprobs.logprob == pytest.approx(decoded.logprobs.logprob, abs=1e-4)
        expected = [(token, pytest.approx(logprob, abs=1e-4)) for token, logprob in decoded.logprobs.top]
        assert anew.logprobs.top == expected
        sequence.num_computed_tokens = num_tokens
        sequence.token_ids.append(decoded.token_id)


def test_min_tokens_knows_the_end_of_sequence_token(loaded: LoadedModel) -> None:
    runner = runner_for(loaded)
    forced: dict[str, Any] = {"temperature": 0.0, "logit_bias": {EOS_TOKEN_ID: 100.0}}
    assert outputs(runner, chunk=100, **forced) == [[EOS_TOKEN_ID] * 20] * 4
    held_back = outputs(runner, chunk=100, **forced, min_tokens=10)
    assert all(EOS_TOKEN_ID not in output[:10] and output[10] == EOS_TOKEN_ID for output in held_back)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(directory: Path, dtype: str) -> None:
    config = config_for(directory, dtype=dtype)
    runner = ModelRunner(config, load_model(config), num_threads=1)
    assert all(len(output) == 20 for output in outputs(runner, chunk=100, temperature=0.0))


def test_the_card_tells_what_gateways_must_know(loaded: LoadedModel) -> None:
    card = runner_for(loaded, max_model_len=100).model_card
    assert (card.name, card.architecture, card.max_model_len) == ("tiny", "LlamaForCausalLM", 100)
    assert (card.num_blocks, card.block_size, card.eos_token_ids) == (64, 16, [EOS_TOKEN_ID])
    assert runner_for(loaded).model_card.max_model_len == 256  # what the model was trained for


def test_more_context_than_was_trained_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="256") as caught:
        runner_for(loaded, max_model_len=257)
    assert caught.value.param == "max_model_len"


# -------------------------------------------------------------------------- size of the cache


def test_the_size_of_the_cache_is_logged(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner_for(loaded, max_model_len=100)  # 7 blocks per request
    assert "KV cache in float32: 64 blocks = 1024 tokens; 9 requests of full length" in caplog.messages


def test_the_budget_gives_whole_blocks_and_no_more_than_can_be_used(loaded: LoadedModel) -> None:
    spec = loaded.spec
    block = bytes_per_block(spec, 16, torch.float32)
    assert block == 2 * 2 * 2 * 16 * 16 * 4  # k and v, layers, KV heads, tokens, head_dim, bytes

    def blocks(free_bytes: int = 0, **changes: Any) -> int:
        config = config_for("unused", **({"num_gpu_blocks_override": None} | changes))
        return plan_num_blocks(config, spec, 100, free_bytes)

    assert blocks(kv_cache_memory_bytes=20 * block + 5) == 20
    assert blocks(free_bytes=40 * block, gpu_memory_utilization=0.5) == 20
    assert blocks(free_bytes=2**40, max_num_seqs=3) == 3 * 7
    assert blocks(num_gpu_blocks_override=1000) == 1000


@pytest.mark.parametrize(("name", "head_bytes"), [("auto", 32), ("float32", 64), ("int8", 20)])
def test_fewer_bytes_of_a_number_give_more_blocks(loaded: LoadedModel, name: str, head_bytes: int) -> None:
    """A scale stands behind each vector of int8."""
    config = config_for(
        "unused", kv_cache_dtype=name, num_gpu_blocks_override=None, kv_cache_memory_bytes=2**20
    )
    block = 2 * 2 * 2 * 16 * head_bytes  # k and v, layers, KV heads, tokens
    assert plan_num_blocks(config, loaded.spec, 100, free_bytes=0) == min(2**20 // block, 8 * 7)
    cache = allocate_kv_cache(config, loaded.spec, 100, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == cache.num_blocks * block


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_a_copied_block_has_all_of_the_other_one(loaded: LoadedModel, name: str) -> None:
    config = config_for("unused", kv_cache_dtype=name)
    cache = allocate_kv_cache(config, loaded.spec, 100, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randint(-100, 100, tensor.shape))
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    copy_blocks(cache, [BlockCopy(BlockId(3), BlockId(5)), BlockCopy(BlockId(5), BlockId(1))])
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor[5], old[3])
        assert torch.equal(tensor[1], old[3])
        assert torch.equal(tensor[6:], old[6:])


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_back_ends_agree_on_a_rounded_cache(loaded: LoadedModel, name: str) -> None:
    plain = outputs(runner_for(loaded, kv_cache_dtype=name, back_end="reference"), chunk=5, temperature=0.0)
    assert outputs(runner_for(loaded, kv_cache_dtype=name), chunk=100, temperature=0.0) == plain


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kv_cache_dtype": "int8", "device": "cuda"}, "int8 is for the device cpu"),
        ({"kv_cache_dtype": "bfloat16"}, "bfloat16 is for the dtype bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: "),
        ({"kv_cache_dtype": "int8", "runner": "pooling"}, "kv_cache_dtype has no meaning"),
    ],
)
def test_a_cache_type_that_does_not_go_with_the_rest_is_refused(
    changes: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_config({"models": [{"name": "tiny", "source": "unused", **changes}]})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_gpu_blocks_override": 6}, "num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": None}, "gpu_memory_utilization"),
    ],
)
def test_a_cache_too_small_for_one_request_is_refused(
    loaded: LoadedModel, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"raise {field} or lower max_model_len") as caught:
        plan_num_blocks(config_for("unused", **changes), loaded.spec, 100, free_bytes=1000)
    assert caught.value.param == field


def test_openmp_threads_are_kept_from_spinning_unless_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    bound_openmp_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    bound_openmp_spinning()
    assert int(os.environ["GOMP_SPINCOUNT"]) < 300_000
    monkeypatch.delenv("GOMP_SPINCOUNT")


# -------------------------------------------------------------------------- free memory


def test_free_memory_stays_within_the_limit_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_headroom_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert container_headroom_bytes(tmp_path) > 2**50
    assert container_headroom_bytes(tmp_path / "absent") > 2**50
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:      5 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 5 * 1024


def test_the_threads_are_chosen_by_the_time_of_a_step(directory: Path, loaded: LoadedModel) -> None:
    runner = ModelRunner(config_for(directory), loaded, num_threads=4, back_end="cpu")
    assert isinstance(runner._operators, CpuOperators)
    team = runner._operators.team
    now = 0.0

    def clock() -> float:  # a step takes as many seconds as there are threads
        nonlocal now
        now += team.num_threads
        return now

    runner.choose_num_threads(clock)
    assert team.num_threads == 1
    before = outputs(runner_for(loaded), chunk=32)
    assert outputs(runner, chunk=32) == before, "what was timed left nothing behind"


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_torch_keeps_its_threads_only_for_models_that_it_computes(
    directory: Path, tmp_path: Path, runner: str
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    write_tiny_model(tmp_path, "MixtralForCausalLM", **shape, **experts, max_position_embeddings=64)
    load = {"generate": load_served_model, "pooling": load_served_embedder}[runner]
    before = torch.get_num_threads()
    try:
        for source, options, expected in (
            (directory, {}, 1),
            (directory, {"dtype": "bfloat16"}, 2),
            (tmp_path, {}, 2),
        ):
            pooled = (
                {"num_gpu_blocks_override": None, "kv_cache_dtype": "auto"} if runner == "pooling" else {}
            )
            load(config_for(source, runner=runner, num_threads=2, max_model_len=64, **pooled, **options))
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
