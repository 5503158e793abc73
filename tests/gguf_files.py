"""Writes small GGUF models, tensor formats of choice, from the tensors of a Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: Any,
    tokenizer_json: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre_tokenizer: str = "gpt-2",
) -> None:
    """A transformers Llama as llama.cpp's converter writes it; matrices as `kind`, norms in float32."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    _write_tokenizer(writer, json.loads(tokenizer_json.read_text()), pre_tokenizer)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = tensor.numpy()
        if "q_proj" in name:
            values = _permute(values, config.num_attention_heads)
        elif "k_proj" in name:
            values = _permute(values, config.num_key_value_heads)
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"
