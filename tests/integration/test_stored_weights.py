"""Models that compute with the blocks of their GGUF file: what stays as it is, and that answers do, too."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine_service import LLM, SamplingParams
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.models.weight_form import Matrix, PackedStack
from engine_service.models.weights import DecoderWeights
from kernels.cpu.packed_linear import PackedWeight
from shared.config import ModelConfig, Quantization
from shared.errors import ConfigError
from tests.gguf_files import write_gguf
from tests.models import write_tiny_llama, write_tiny_model

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7, 250, 9, 10, 11], [300], [40, 41, 42, 43, 44] * 5]
F16, F32, Q4_0, Q4_1, Q8_0 = (GGMLQuantizationType[name] for name in ("F16", "F32", "Q4_0", "Q4_1", "Q8_0"))
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
Kind = GGMLQuantizationType | Callable[[str], GGMLQuantizationType]


def write(path: Path, kind: Kind, **changes: Any) -> Path:
    """A tiny Llama, as GGUF."""
    model = write_tiny_llama(path, **changes)
    write_gguf(path / "tiny.gguf", model, path / "tokenizer.json", kind=kind)
    return path / "tiny.gguf"


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(name="tiny", source=str(path), **options))


def weights_of(path: Path, **options: Any) -> DecoderWeights:
    weights = load(path, **options).weights
    assert isinstance(weights, DecoderWeights)
    return weights


def formats_of(path: Path, **options: Any) -> dict[str, str]:
    """What the matrices of the first layer, the embedding and the head are kept in."""
    weights = weights_of(path, **options)
    layer = weights.layers[0]
    assert layer.gate_up is not None
    assert layer.down is not None
    matrices: dict[str, Matrix] = {
        "embedding": weights.embedding,
        "qkv": layer.qkv,
        "output": layer.attention_output,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "head": weights.head,
    }
    return {name: format_of(matrix) for name, matrix in matrices.items()}


def format_of(matrix: Matrix) -> str:
    if isinstance(matrix, PackedStack):
        return "+".join(part.format.name for part in matrix.parts)
    return matrix.format.name if isinstance(matrix, PackedWeight) else str(matrix.dtype)


def logprobs_of(path: Path, quantization: Quantization | None) -> torch.Tensor:
    """Of the prompts' tokens and of those that follow: everything that a model says goes into them."""
    with LLM(
        str(path),
        quantization=quantization,
        activation_dtype="int16",  # whose rounding does not show beside that of weights
        max_model_len=64,
        num_gpu_blocks_override=32,
        kv_cache_dtype="float32",
    ) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
        found: list[float] = []
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
            assert output.prompt_logprobs is not None
            answer = output.outputs[0]
            assert answer.logprobs is not None
            for token, told in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
                assert told is not None
                found.append(told[token].logprob)
            found += [
                told[token].logprob for token, told in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
    return torch.tensor(found)


MIXED: dict[str, tuple[Kind, dict[str, str]]] = {
    "all-q4_0": (
        Q4_0,
        dict.fromkeys(("embedding", "qkv", "output", "gate_up", "down", "head"), "int4_group32"),
    ),
    "default-model": (
        lambda name: Q8_0 if name == "token_embd" else Q4_1,
        {"embedding": "int8_group32", "qkv": "int4_group32", "down": "int4_group32"},
    ),
    "one-part-in-bytes": (
        lambda name: Q8_0 if name.endswith("attn_v") else Q4_0,
        {"qkv": "int8_group32", "output": "int4_group32"},
    ),
    "parts-with-no-common-format": (
        lambda name: Q8_0 if name.endswith(("attn_v", "ffn_up")) else Q4_1,
        {"qkv": "int4_group32+int8_group32", "gate_up": "float32", "down": "int4_group32"},
    ),
    "floats-among-blocks": (
        lambda name: F16 if name.endswith(("attn_k", "ffn_down")) else Q8_0,
        {"qkv": "int8_group32+float32+int8_group32", "down": "float32", "gate_up": "int8_group32"},
    ),
    "floats-only": (F16, dict.fromkeys(("embedding", "qkv", "down", "head"), "float32")),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MIXED)
def test_blocks_are_kept_and_answers_are_those_of_the_dequantised_model(
    tmp_path: Path, name: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kind, expected = MIXED[name]
    path = write(tmp_path, kind, tie_word_embeddings=tied, attention_bias=True)
    with caplog.at_level(logging.INFO):
        formats = formats_of(path)
    assert expected.items() <= formats.items()
    says_so = "gate_up is kept in float32: its halves are stored in different formats" in caplog.text
    assert says_so == (name == "parts-with-no-common-format")
    weights = weights_of(path)
    assert (weights.head is weights.embedding) == tied
    torch.testing.assert_close(logprobs_of(path, None), logprobs_of(path, "none"), rtol=0, atol=2e-3)


def test_a_matrix_that_a_file_holds_in_one_piece_is_kept_in_one(tmp_path: Path) -> None:
    model = write_tiny_model(
        tmp_path,
        "Phi3ForCausalLM",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json", kind=Q4_1)
    path = tmp_path / "tiny.gguf"
    assert set(formats_of(path).values()) == {"int4_group32"}
    torch.testing.assert_close(logprobs_of(path, None), logprobs_of(path, "none"), rtol=0, atol=2e-3)


def test_the_mix_of_k_quants_that_most_files_are_is_kept_in_its_blocks(tmp_path: Path) -> None:
    """llama.cpp's Q4_K_M."""
    finer = ("token_embd", "attn_v", "ffn_down")
    path = write(
        tmp_path,
        lambda name: Q6_K if name.endswith(finer) else Q4_K,
        hidden_size=256,
        intermediate_size=512,
        attention_bias=True,
    )
    assert formats_of(path) == {
        "embedding": "int8_group16",
        "qkv": "int4_group32+int8_group16",
        "output": "int4_group32",
        "gate_up": "int4_group32",
        "down": "int8_group16",
        "head": "int8_group16",
    }
    torch.testing.assert_close(logprobs_of(path, None), logprobs_of(path, "none"), rtol=1e-3, atol=2e-3)


def test_a_tied_model_in_blocks_has_no_table_of_floats(tmp_path: Path) -> None:
    path = write(tmp_path, Q8_0)
    as_floats, as_stored = (weights_of(path, quantization=each).num_bytes for each in ("none", None))
    assert as_stored < 0.4 * as_floats


def test_int8_keeps_bytes_and_rounds_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, lambda name: Q8_0 if name == "token_embd" else Q4_1)
    formats = formats_of(path, quantization="int8")
    assert formats["head"] == "int8_group32"
    assert formats["qkv"] == formats["gate_up"] == "int8_group64"
    assert formats["down"] == "int8_group32"  # 96 inputs
    assert set(formats_of(tmp_path, quantization="int8").values()) == {"int8_group64", "int8_group32"}
    difference = (logprobs_of(path, "int8") - logprobs_of(path, "none")).abs()
    assert 1e-3 < float(difference.mean()) < 0.2


def test_no_quantization_is_packed_floats_and_other_types_and_devices_get_tensors(tmp_path: Path) -> None:
    path = write(tmp_path, Q4_1)
    for options, expected in (
        ({"quantization": "none"}, "float32"),
        ({"dtype": "bfloat16"}, "torch.bfloat16"),
        ({"dtype": "bfloat16", "quantization": "none"}, "torch.bfloat16"),
        ({"device": "cuda"}, "torch.float32"),
    ):
        assert set(formats_of(path, **options).values()) == {expected}


def test_int8_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="int8 is for the device cpu with the dtype float32"):
        ModelConfig(name="x", source="x", quantization="int8", dtype="bfloat16")


def test_embedding_models_keep_their_blocks_too(tmp_path: Path) -> None:
    path = write(tmp_path, Q8_0)
    vectors = []
    for quantization in (None, "none"):
        with LLM(str(path), runner="pooling", quantization=quantization) as llm:
            outputs = llm.embed(PROMPTS, use_tqdm=False)
            vectors.append(torch.tensor([output.outputs.embedding for output in outputs]))
    assert not torch.equal(vectors[0], vectors[1])  # activations of 16 bits
    torch.testing.assert_close(vectors[0], vectors[1], rtol=0, atol=1e-3)


def test_a_module_of_transformers_is_not_rounded(tmp_path: Path) -> None:
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    write_tiny_model(tmp_path, "BertModel", **settings)
    with pytest.raises(ConfigError, match="cannot be quantised") as caught:
        LLM(str(tmp_path), runner="pooling", quantization="int8")
    assert caught.value.param == "quantization"


_WITHOUT_COMPILER = """
import logging, sys, warnings
logging.basicConfig(level=logging.WARNING)
import kernels.cpu.build, pathlib
kernels.cpu.build._FOLDER = pathlib.Path(sys.argv[1]).parent  # where nothing was built before
from tests.integration.test_stored_weights import formats_of, logprobs_of
import torch
path = pathlib.Path(sys.argv[1])
quantization = None if sys.argv[2] == "stored" else sys.argv[2]
torch.save(logprobs_of(path, quantization), path.with_suffix(".pt"))
print(sorted(set(formats_of(path, quantization=quantization).values())))
"""


@pytest.mark.parametrize("quantization", [None, "int8", "none"])
def test_without_a_compiler_everything_works_with_one_warning(
    tmp_path: Path, quantization: Quantization | None
) -> None:
    path = write(tmp_path, Q4_1)
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_COMPILER, str(path), quantization or "stored"],
        cwd=ROOT,
        env=environment | {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["['torch.float32']"]
    warnings = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "such as g++ 11" in warnings[0]
    plain = torch.load(path.with_suffix(".pt"))
    torch.testing.assert_close(plain, logprobs_of(path, quantization), rtol=0, atol=2e-3)
