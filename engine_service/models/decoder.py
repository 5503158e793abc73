"""Our own decoder: RMSNorm, rotary, grouped-query attention, gated MLP (Llama: arXiv 2302.13971).

What the families add to it is data: `DecoderSpec` and its `LayerSpec`s say it, families.py declares it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_service.kv_cache import KVCache
from engine_service.models.experts import mixture_of_experts
from engine_service.models.linear import DenseLinears, Linear, Linears
from engine_service.models.native import native_decoder
from engine_service.models.rotary import rotary_tables
from engine_service.models.spec import DecoderSpec, RopeSpec
from engine_service.models.weights import DecoderWeights, ExpertWeights, LayerWeights
from kernels.attention_metadata import AttentionMetadata
from kernels.operators import Operators


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """What a layer computes with. What it does not have is None; it has `gated` and `down`, or `experts`."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    attention_output: Linear
    post_attention_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gated: Linear | None
    down: Linear | None
    experts: ExpertWeights | None
    post_mlp_norm: Tensor | None  # [hidden]


class DecoderModel:
    """The `engine_service.models.registry.Model` of our families. Stateless: the KV cache is handed in."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        operators: Operators,
        *,
        num_positions: int,
        linears: Linears | None = None,
        is_native: bool = True,
    ) -> None:
        """`linears` makes what multiplies with the matrices, but for those of experts; None: torch.

        `is_native`: whole steps in C++, where that can be; if not, operator by operator, to the same result.
        """
        linears = linears or DenseLinears(operators)
        self._spec = spec
        self._operators = operators
        self._lookup = linears.lookup(weights.embedding)
        self._layers = [_make_layer(spec, layer, linears) for layer in weights.layers]
        self._norm = weights.norm
        self._head = linears.plain(weights.head)
        self._gate = {"silu": operators.silu_and_mul, "gelu_tanh": operators.gelu_tanh_and_mul}[
            spec.activation
        ]
        # As transformers multiplies: with the number rounded to the type of the embedding.
        self._embedding_multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=weights.dtype))
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for rope in {layer.rope for layer in spec.layers if layer.rope is not None}:
            cos, sin = rotary_tables(rope, num_positions)
            self._tables[rope] = (cos.to(weights.device), sin.to(weights.device))
        self._native = (
            native_decoder(spec, self._layers, self._norm, self._tables, operators) if is_native else None
        )

    @property
    def is_native(self) -> bool:
        return self._native is not None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        return self._logits(self.hidden_states(token_ids, positions, kv_cache, metadata, logit_rows))

    def forward_in_parts(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        parts: SequenceOf[Tensor],
    ) -> Iterator[Tensor]:
        hidden = self.hidden_states(token_ids, positions, kv_cache, metadata, torch.cat(list(parts)))
        return map(self._logits, torch.split(hidden, [len(part) for part in parts]))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden).float()
        if self._spec.logit_divisor != 1.0:
            logits = logits / self._spec.logit_divisor
        if (cap := self._spec.logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: Tensor,
    ) -> Tensor:
        """As `forward`, but what the output projection reads: `[num_rows, hidden]`, after the last norm."""
        layers, operators, eps = self._layers, self._operators, self._spec.rms_norm_eps
        residual = self._lookup(token_ids)  # [num_tokens, hidden], ours to change
        if self._embedding_multiplier != 1.0:
            residual *= self._embedding_multiplier
        if self._native is not None:
            keys, values = kv_cache.keys, kv_cache.values
            return self._native.hidden_states(residual, positions, keys, values, metadata, rows)
        normed = operators.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attention(normed, positions, layer, kv_cache, index, metadata)
            is_last = index + 1 == len(layers)
            if is_last:  # only the wanted rows go on: a prompt chunk of 512 tokens needs one, or none
                attended, residual = attended[rows], residual[rows]
            attended = self._for_residual(attended, layer.post_attention_norm)
            normed = operators.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            transformed = self._for_residual(self._mlp(normed, layer, index), layer.post_mlp_norm)
            next_norm = self._norm if is_last else layers[index + 1].input_norm
            normed = operators.add_rms_norm(transformed, residual, next_norm, eps)
        return normed

    def _attention(
        self,
        normed: Tensor,
        positions: Tensor,
        layer: DecoderLayer,
        kv_cache: KVCache,
        index: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        spec, operators, layer_spec = self._spec, self._operators, self._spec.layers[index]
        qkv = layer.qkv(normed)
        query, key, value = torch.split(qkv, [spec.query_width, spec.kv_width, spec.kv_width], dim=-1)
        query = self._heads(query, spec.num_heads, layer.query_norm)
        key = self._heads(key, spec.num_kv_heads, layer.key_norm)
        value = self._heads(value, spec.num_kv_heads, None)
        if layer_spec.rope is not None:
            operators.rotary(query, key, positions, *self._tables[layer_spec.rope])
        key_cache, value_cache = kv_cache.keys[index], kv_cache.values[index]
        operators.write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
        attended = operators.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            spec.attention_scale,
            window=layer_spec.window,
            softcap=spec.attention_softcap,
        )
        return layer.attention_output(attended.flatten(1))

    def _heads(self, flat: Tensor, num_heads: int, norm: Tensor | None) -> Tensor:
        """`[num_tokens, num_heads * head_dim]`, each head normed if there is a norm, as separate heads."""
        shape = (-1, num_heads, self._spec.head_dim)
        if norm is None:
            return flat.view(shape)
        each = flat.reshape(-1, self._spec.head_dim)
        return self._operators.rms_norm(each, norm, self._spec.rms_norm_eps).view(shape)

    def _mlp(self, normed: Tensor, layer: DecoderLayer, index: int) -> Tensor:
        if layer.experts is not None:
            experts = self._spec.layers[index].experts
            assert experts is not None, "weights of experts come with their shape"
            return mixture_of_experts(normed, layer.experts, experts, self._gate)
        assert layer.gated is not None, "a layer has an MLP or experts"
        assert layer.down is not None, "an MLP has both matrices"
        return layer.down(layer.gated(normed))

    def _for_residual(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What half a layer adds to the residual, from what it computed."""
        if norm is not None:
            x = self._operators.rms_norm(x, norm, self._spec.rms_norm_eps)
        return x if self._spec.residual_multiplier == 1.0 else x * self._spec.residual_multiplier


def _make_layer(spec: DecoderSpec, layer: LayerWeights, linears: Linears) -> DecoderLayer:
    gate_up, down = layer.gate_up, layer.down
    return DecoderLayer(
        input_norm=layer.input_norm,
        qkv=linears.plain(layer.qkv, layer.qkv_bias),
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        attention_output=linears.plain(layer.attention_output, layer.attention_output_bias),
        post_attention_norm=layer.post_attention_norm,
        mlp_norm=layer.mlp_norm,
        gated=None if gate_up is None else linears.gated(gate_up, layer.gate_up_bias, spec.activation),
        down=None if down is None else linears.plain(down, layer.down_bias),
        experts=layer.experts,
        post_mlp_norm=layer.post_mlp_norm,
    )
