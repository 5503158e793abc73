"""Writes small GGUF models, tensor formats of choice, from the tensors of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
)

from tests.k_quants import quantize_any

_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "phi3": MODEL_ARCH.PHI3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
}


def write_gguf(
    path: Path,
    model: Any,
    tokenizer_json: Path,
    *,
    kind: GGMLQuantizationType | Callable[[str], GGMLQuantizationType] = GGMLQuantizationType.F32,
    pre_tokenizer: str = "gpt-2",
    adds_eos: bool = False,
) -> None:
    """A model of transformers as llama.cpp's converter writes it; matrices as `kind`, norms in float32.

    `kind` may choose by the tensor's name in the file, without its suffix.
    """
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    name = MODEL_ARCH_NAMES[architecture]
    writer = GGUFWriter(path, name)
    _write_shape(writer, config)
    _write_tokenizer(writer, json.loads(tokenizer_json.read_text()), pre_tokenizer)
    if adds_eos:
        writer.add_add_eos_token(True)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if name == "llama" and "q_proj" in tensor_name:
            values = _permute(values, config.num_attention_heads)
        elif name == "llama" and "k_proj" in tensor_name:
            values = _permute(values, config.num_key_value_heads)
        elif name.startswith("gemma") and tensor_name.endswith("norm.weight"):
            values = values + 1.0
        stem, _, suffix = tensor_name.rpartition(".")
        stored_name = names.get_name(stem)
        stored = GGMLQuantizationType.F32
        if values.ndim == 2:
            stored = kind if isinstance(kind, GGMLQuantizationType) else kind(stored_name)
        writer.add_tensor(f"{stored_name}.{suffix}", quantize_any(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for length in ("long", "short"):
            divisors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", divisors)


def _write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], pre_tokenizer: str) -> None:
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _permute(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's convert_hf_to_gguf.py does for Llama's q and k."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
