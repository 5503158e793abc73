"""The Llama family: RMSNorm, rotary, grouped-query attention, SwiGLU (Touvron et al., arXiv 2302.13971)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from engine_service.kv_cache import KVCache
from engine_service.models.rotary import rotary_tables
from engine_service.models.spec import ModelSpec
from engine_service.models.weights import LayerWeights, LlamaWeights, NamedTensor, collect_llama_weights
from kernels.attention_metadata import AttentionMetadata
from kernels.operators import Operators


class LlamaModel:
    """One forward pass over the flat tokens of a step. Stateless: the KV cache is handed in."""

    def __init__(
        self, spec: ModelSpec, weights: LlamaWeights, operators: Operators, *, num_positions: int
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._operators = operators
        self._scale = spec.head_dim**-0.5
        cos, sin = rotary_tables(spec.rope, spec.head_dim, num_positions)
        self._cos = cos.to(weights.embedding.device)
        self._sin = sin.to(weights.embedding.device)

    @staticmethod
    def collect_weights(spec: ModelSpec, tensors: Iterable[NamedTensor], dtype: torch.dtype) -> LlamaWeights:
        return collect_llama_weights(spec, tensors, dtype)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        """Logits of some tokens; keys and values of all.

        token_ids, positions: int64 `[num_tokens]`. logit_rows: int64 `[num_logits]`, which tokens'
        logits are wanted. Returns float32 `[num_logits, vocab]`. Writes the step's slots of kv_cache.
        """
        weights, operators, eps = self._weights, self._operators, self._spec.rms_norm_eps
        residual = embedding(token_ids, weights.embedding)  # [num_tokens, hidden], ours to change
        normed = operators.rms_norm(residual, weights.layers[0].input_norm, eps)
        for index, layer in enumerate(weights.layers):
            attended = self._attention(normed, positions, layer, kv_cache, index, metadata)
            is_last = index + 1 == len(weights.layers)
            if is_last:  # only the wanted rows go on: a prompt chunk of 512 tokens needs one, or none
                attended, residual = attended[logit_rows], residual[logit_rows]
            normed = operators.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            transformed = linear(operators.silu_and_mul(linear(normed, layer.gate_up)), layer.down)
            next_norm = weights.norm if is_last else weights.layers[index + 1].input_norm
            normed = operators.add_rms_norm(transformed, residual, next_norm, eps)
        return linear(normed, weights.head).float()

    def _attention(
        self,
        normed: Tensor,
        positions: Tensor,
        layer: LayerWeights,
        kv_cache: KVCache,
        index: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        spec, operators = self._spec, self._operators
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        query, key, value = torch.split(qkv, [spec.query_width, spec.kv_width, spec.kv_width], dim=-1)
        query = query.view(-1, spec.num_heads, spec.head_dim)
        key = key.view(-1, spec.num_kv_heads, spec.head_dim)
        value = value.view(-1, spec.num_kv_heads, spec.head_dim)
        operators.rotary(query, key, positions, self._cos, self._sin)
        key_cache, value_cache = kv_cache.keys[index], kv_cache.values[index]
        operators.write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
        attended = operators.paged_attention(query, key_cache, value_cache, metadata, self._scale)
        return linear(attended.flatten(1), layer.attention_output, layer.attention_output_bias)
