"""Models in GGUF files: metadata to a spec, tensors to Hugging Face's names and layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_service.loaders.gguf_file import GgufFile
from engine_service.loaders.gguf_text import read_text_bundle
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.models.decoder_config import read_decoder_spec
from engine_service.models.rope_config import DIVISORS
from engine_service.models.spec import DecoderSpec
from engine_service.models.weight_form import StoredMatrix, WeightForm
from engine_service.models.weights import NamedTensor, collect_weights
from kernels.gguf_blocks import BLOCK_BYTES, weight_from_blocks
from shared.errors import ConfigError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
# llama.cpp's converter reorders q and k rows of these for its interleaved rotary embedding.
_PERMUTED_ARCHITECTURES = frozenset({"llama"})
# It also adds the 1 to the norm weights of these that Hugging Face's modules add when they run.
_OFFSET_ARCHITECTURES = frozenset({"gemma2", "gemma3"})
_ROPE_DIVISORS = "rope_freqs.weight"
_LONG_DIVISORS, _SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
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
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma's layers have a norm before and one after each half, under names of their own.
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_NAMES = _LAYER_NAMES | {"ffn_up": "mlp.gate_up_proj"}
_LAYER_NAMES_OF = {"gemma2": _GEMMA_NAMES, "gemma3": _GEMMA_NAMES, "phi3": _PHI3_NAMES}
# Models of 27B, by their number of layers: llama.cpp knows by it that their attention is scaled by
# hidden_size / num_heads and not by head_dim, which the file does not say (its llama-model.cpp).
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def load_gguf(path: Path, form: WeightForm) -> LoadedModel:
    """Reads tensor by tensor: beside the finished weights only the parts of one matrix are in memory.

    Raises ConfigError if the file is not a complete model of a known architecture.
    """
    with GgufFile(path) as file:
        spec = read_spec(file)
        weights = collect_weights(spec, read_tensors(file, spec), form)
        return LoadedModel(spec=spec, weights=weights, text_bundle=read_text_bundle(file))


def read_spec(file: GgufFile) -> DecoderSpec:
    kind = file.require("general.architecture", str)
    if kind not in _ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {kind!r} is not supported; known: {', '.join(sorted(_ARCHITECTURES))}",
            "source",
        )
    if (num_experts := file.get(f"{kind}.expert_count", int)) and num_experts > 1:
        raise ConfigError("mixture-of-experts models are not supported in GGUF files", "source")
    config = _read_config(file, kind)
    architecture = _ARCHITECTURES[kind]
    if kind == "llama" and "sliding_window" in config:
        architecture = "MistralForCausalLM"  # which llama.cpp stores as a Llama
    if kind.startswith("qwen") and "sliding_window" in config:
        raise ConfigError(f"{kind} with a sliding window is not supported in GGUF files", "source")
    return read_decoder_spec(config, architecture)


def _read_config(file: GgufFile, kind: str) -> dict[str, Any]:
    """The metadata under the names of Hugging Face's config.json. What is not there is left out."""
    hidden_size = file.require(f"{kind}.embedding_length", int)
    num_heads = file.require(f"{kind}.attention.head_count", int)
    head_dim = file.get(f"{kind}.attention.key_length", int) or hidden_size // num_heads
    rotary_dim = file.get(f"{kind}.rope.dimension_count", int)
    context_len = file.require(f"{kind}.context_length", int)
    config: dict[str, Any] = {
        "vocab_size": file.tensor_shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{kind}.feed_forward_length", int),
        "num_hidden_layers": file.require(f"{kind}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{kind}.attention.head_count_kv", int) or num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": file.require(f"{kind}.attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": context_len,
        "original_max_position_embeddings": file.get(f"{kind}.rope.scaling.original_context_length", int),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in file.tensor_names,
        "partial_rotary_factor": None if rotary_dim is None else rotary_dim / head_dim,
        "sliding_window": file.get(f"{kind}.attention.sliding_window", int) or None,
        "rope_theta": file.get(f"{kind}.rope.freq_base", float),
        "rope_scaling": _read_scaling(file, kind),
        "attn_logit_softcapping": file.get(f"{kind}.attn_logit_softcapping", float),
        "final_logit_softcapping": file.get(f"{kind}.final_logit_softcapping", float),
    }
    if kind in _GEMMA_27B_LAYERS:
        config |= _read_gemma(file, kind, config)
    return {name: value for name, value in config.items() if value is not None}


def _read_gemma(file: GgufFile, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[kind]
    scale_dim = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "query_pre_attn_scalar": scale_dim,
        "rope_local_base_freq": file.get(f"{kind}.rope.freq_base_swa", float),
        "sliding_window_pattern": file.get(f"{kind}.attention.sliding_window_pattern", int),
    }


def _read_scaling(file: GgufFile, kind: str) -> dict[str, Any] | None:
    if _ROPE_DIVISORS in file.tensor_names:
        return {"rope_type": DIVISORS, "divisors": file.tensor(_ROPE_DIVISORS).tolist()}
    if _LONG_DIVISORS in file.tensor_names:
        return {
            "rope_type": "longrope",
            "long_factor": file.tensor(_LONG_DIVISORS).tolist(),
            "short_factor": file.tensor(_SHORT_DIVISORS).tolist(),
            "attention_factor": file.get(f"{kind}.rope.scaling.attn_factor", float),
        }
    scaling = file.get(f"{kind}.rope.scaling.type", str)
    if scaling in (None, "none"):
        return None
    if scaling != "linear":
        raise ConfigError(f"rotary scaling {scaling!r} is not supported in GGUF files", "source")
    return {"rope_type": "linear", "factor": file.require(f"{kind}.rope.scaling.factor", float)}


def read_tensors(file: GgufFile, spec: DecoderSpec) -> Iterator[NamedTensor]:
    """Names and layout as in Hugging Face's checkpoint of the same model; float32, or blocks as they are."""
    kind = file.require("general.architecture", str)
    layer_names = _LAYER_NAMES_OF.get(kind, _LAYER_NAMES)
    for name in file.tensor_names:
        if name in (_ROPE_DIVISORS, _LONG_DIVISORS, _SHORT_DIVISORS):
            continue
        tensor = _read_tensor(file, name)
        if kind in _PERMUTED_ARCHITECTURES and ".attn_q." in name:
            tensor = _rows(tensor, _original_order(tensor.shape[0], spec.num_heads))
        elif kind in _PERMUTED_ARCHITECTURES and ".attn_k." in name:
            tensor = _rows(tensor, _original_order(tensor.shape[0], spec.num_kv_heads))
        elif kind in _OFFSET_ARCHITECTURES and isinstance(tensor, Tensor) and name.endswith("norm.weight"):
            tensor = tensor - 1.0
        yield _huggingface_name(name, layer_names), tensor


def _read_tensor(file: GgufFile, name: str) -> StoredMatrix:
    kind = file.tensor_kind(name)
    if kind in BLOCK_BYTES and len(file.tensor_shape(name)) == 2:
        return weight_from_blocks(torch.from_numpy(file.blocks(name)), kind)
    return torch.from_numpy(file.tensor(name))


def _huggingface_name(name: str, layer_names: Mapping[str, str]) -> str:
    """A name we do not know is passed on as it is, and refused by whoever collects the weights."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, suffix = match.groups()
        if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{suffix}"
    stem, _, suffix = name.rpartition(".")
    return f"{_MODEL_NAMES[stem]}.{suffix}" if stem in _MODEL_NAMES else name


def _rows(tensor: StoredMatrix, order: Tensor) -> StoredMatrix:
    return tensor[order] if isinstance(tensor, Tensor) else tensor.rows(order)


def _original_order(num_rows: int, num_heads: int) -> Tensor:
    """Rows of each head from interleaved pairs (2i, 2i + 1) back to halves (i, i + head_dim / 2).

    Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py. For weights and biases.
    """
    rows = torch.arange(num_rows)
    if num_rows % (2 * num_heads):
        return rows  # of another shape than the model's: refused by whoever collects the weights
    return rows.reshape(num_heads, -1, 2).transpose(1, 2).reshape(num_rows)
