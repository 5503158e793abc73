"""Every operator in plain torch: slow, obvious, on any device. The oracle of the other back ends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_vectors import load_vectors, store_vectors


class ReferenceOperators:
    """Contracts: `kernels.operators.Operators`."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        cos_rows = cos[positions].unsqueeze(1)  # [num_tokens, 1, half]
        sin_rows = sin[positions].unsqueeze(1)
        for heads in (query, key):
            rotated = heads[..., : 2 * cos.shape[1]]
            first, second = rotated.float().chunk(2, dim=-1)
            rotated.copy_(
                torch.cat(
                    (first * cos_rows - second * sin_rows, second * cos_rows + first * sin_rows), dim=-1
                )
            )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu(gate, approximate="tanh") * up

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        block_size = key_cache.shape[2]
        blocks = slot_mapping // block_size
        offsets = slot_mapping % block_size
        key_cache[blocks, :, offsets] = store_vectors(key, key_cache.dtype)
        value_cache[blocks, :, offsets] = store_vectors(value, value_cache.dtype)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        starts = metadata.query_start.tolist()
        for index, context_len in enumerate(metadata.context_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            table = metadata.block_tables[index]
            keys = _gather(key_cache, table, context_len)
            values = _gather(value_cache, table, context_len)
            output[rows] = _causal_attention(query[rows], keys, values, scale, window, softcap)
        return output


def _gather(cache: Tensor, table: Tensor, context_len: int) -> Tensor:
    """The first vectors of a sequence: float32 `[num_kv_heads, context_len, head_dim]`."""
    _, num_kv_heads, block_size, width = cache.shape
    num_blocks = -(-context_len // block_size)
    pages = cache[table[:num_blocks].long()]  # [num_blocks, num_kv_heads, block_size, width]
    flat = pages.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, width)
    return load_vectors(flat[:, :context_len])


def _causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Of the last rows of a context. query `[q, num_heads, head_dim]`, keys `[num_kv_heads, c, head_dim]`."""
    num_rows, num_heads, _ = query.shape
    num_kv_heads, context_len, _ = keys.shape
    group = num_heads // num_kv_heads
    heads_first = query.float().transpose(0, 1)  # [num_heads, q, head_dim]
    scores = heads_first @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row_positions = torch.arange(context_len - num_rows, context_len, device=query.device)
    # How far back each key lies from each row: [q, c], negative for keys that come later.
    distances = row_positions[:, None] - torch.arange(context_len, device=query.device)[None, :]
    is_hidden = distances < 0
    if window is not None:
        is_hidden |= distances >= window
    scores.masked_fill_(is_hidden, float("-inf"))
    weighted = scores.softmax(-1) @ values.repeat_interleave(group, 0)
    return weighted.transpose(0, 1).to(query.dtype)
