"""Models as Hugging Face directories: config.json and safetensors, in one file or sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine_service.loaders.huggingface_text import read_text_bundle
from engine_service.loaders.json_file import read_json
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.models.registry import model_class
from engine_service.models.spec import Llama3Scaling, ModelSpec, RopeSpec
from engine_service.models.weights import NamedTensor
from shared.errors import ConfigError


def load_huggingface(path: Path, dtype: torch.dtype) -> LoadedModel:
    """Raises ConfigError if the directory is not a complete model of a known architecture."""
    config = read_json(path / "config.json")
    architecture = (config.get("architectures") or ["none"])[0]
    architecture_class = model_class(architecture)
    try:
        spec = _read_spec(config, architecture)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path / 'config.json'}: a value is missing or malformed: {error}", "source"
        ) from error
    weights = architecture_class.collect_weights(spec, _read_tensors(path), dtype)
    return LoadedModel(spec=spec, weights=weights, text_bundle=read_text_bundle(path, config))


def _read_spec(config: Mapping[str, Any], architecture: str) -> ModelSpec:
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"activation {config['hidden_act']!r} is not supported; known: silu", "source")
    if "quantization_config" in config:
        raise ConfigError(
            "quantised safetensors are not supported; use the original or a GGUF file", "source"
        )
    window_is_used = config.get("use_sliding_window", architecture == "MistralForCausalLM")
    if window_is_used and config.get("sliding_window") is not None:
        raise ConfigError("sliding-window attention is not supported", "source")
    num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    return ModelSpec(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        context_len=int(config["max_position_embeddings"]),
        has_tied_head=bool(config.get("tie_word_embeddings", False)),
        rope=_read_rope(config),
    )


def _read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """Both spellings: `rope_theta` with `rope_scaling` (transformers 4), `rope_parameters` (5)."""
    given: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("rotary over a part of the dimensions is not supported", "source")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, linear_factor=float(given["factor"]))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=float(given["factor"]),
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_context_len=int(given["original_max_position_embeddings"]),
        )
        return RopeSpec(theta, llama3=scaling)
    raise ConfigError(f"rotary scaling {kind!r} is not supported; known: default, linear, llama3", "source")


def _read_tensors(path: Path) -> Iterator[NamedTensor]:
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {file}: {error}", "source") from error


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise ConfigError(
        f"directory {path} has no model.safetensors and no model.safetensors.index.json", "source"
    )
