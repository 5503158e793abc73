"""Llama-family models in GGUF files: metadata to ModelSpec, tensors to Hugging Face's names and layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine_service.loaders.gguf_file import GgufFile
from engine_service.loaders.gguf_text import read_text_bundle
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.models.registry import model_class
from engine_service.models.spec import ModelSpec, RopeSpec
from engine_service.models.weights import NamedTensor
from shared.errors import ConfigError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# llama.cpp's converter reorders q and k rows of these for its interleaved rotary embedding.
_PERMUTED_ARCHITECTURES = frozenset({"llama"})
_ROPE_DIVISORS = "rope_freqs.weight"
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def load_gguf(path: Path, dtype: torch.dtype) -> LoadedModel:
    """Reads tensor by tensor: beside the finished weights only one float32 tensor is in memory.

    Raises ConfigError if the file is not a complete model of a known architecture.
    """
    with GgufFile(path) as file:
        spec = read_spec(file)
        weights = model_class(spec.architecture).collect_weights(spec, read_tensors(file, spec), dtype)
        return LoadedModel(spec=spec, weights=weights, text_bundle=read_text_bundle(file))


def read_spec(file: GgufFile) -> ModelSpec:
    kind = file.require("general.architecture", str)
    if kind not in _ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {kind!r} is not supported; known: {', '.join(sorted(_ARCHITECTURES))}",
            "source",
        )
    if (num_experts := file.get(f"{kind}.expert_count", int)) and num_experts > 1:
        raise ConfigError("mixture-of-experts models are not supported", "source")
    hidden_size = file.require(f"{kind}.embedding_length", int)
    num_heads = file.require(f"{kind}.attention.head_count", int)
    head_dim = file.get(f"{kind}.attention.key_length", int) or hidden_size // num_heads
    rotary_dim = file.get(f"{kind}.rope.dimension_count", int)
    if rotary_dim not in (None, head_dim):
        raise ConfigError(f"rotary over {rotary_dim} of {head_dim} dimensions is not supported", "source")
    return ModelSpec(
        architecture=_ARCHITECTURES[kind],
        vocab_size=file.tensor_shape("token_embd.weight")[0],
        hidden_size=hidden_size,
        intermediate_size=file.require(f"{kind}.feed_forward_length", int),
        num_layers=file.require(f"{kind}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=file.get(f"{kind}.attention.head_count_kv", int) or num_heads,
        head_dim=head_dim,
        rms_norm_eps=file.require(f"{kind}.attention.layer_norm_rms_epsilon", float),
        context_len=file.require(f"{kind}.context_length", int),
        has_tied_head="output.weight" not in file.tensor_names,
        rope=_read_rope(file, kind),
    )


def _read_rope(file: GgufFile, kind: str) -> RopeSpec:
    scaling = file.get(f"{kind}.rope.scaling.type", str)
    if scaling not in (None, "none", "linear"):
        raise ConfigError(f"rotary scaling {scaling!r} is not supported", "source")
    factor = file.get(f"{kind}.rope.scaling.factor", float) if scaling == "linear" else None
    divisors = file.tensor(_ROPE_DIVISORS).tolist() if _ROPE_DIVISORS in file.tensor_names else None
    return RopeSpec(
        theta=file.get(f"{kind}.rope.freq_base", float) or 10_000.0,
        linear_factor=factor or 1.0,
        frequency_divisors=tuple(divisors) if divisors is not None else None,
    )


def read_tensors(file: GgufFile, spec: ModelSpec) -> Iterator[NamedTensor]:
    """Names and layout as in Hugging Face's checkpoint of the same model; float32."""
    is_permuted = file.require("general.architecture", str) in _PERMUTED_ARCHITECTURES
    for name, values in file.tensors():
        if name == _ROPE_DIVISORS:
            continue
        tensor = torch.from_numpy(values)
        if is_permuted and ".attn_q." in name:
            tensor = _undo_permutation(tensor, spec.num_heads)
        elif is_permuted and ".attn_k." in name:
            tensor = _undo_permutation(tensor, spec.num_kv_heads)
        yield _huggingface_name(name), tensor


def _huggingface_name(name: str) -> str:
    """A name we do not know is passed on as it is, and refused by whoever collects the weights."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, suffix = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    stem, _, suffix = name.rpartition(".")
    return f"{_MODEL_NAMES[stem]}.{suffix}" if stem in _MODEL_NAMES else name


def _undo_permutation(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from interleaved pairs (2i, 2i + 1) back to halves (i, i + head_dim / 2).

    Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py. Works for weights and biases.
    """
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
