"""Paged attention in Triton: one kernel for any mix of prompt chunks and single tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_metadata import AttentionMetadata

_TILE_KEYS = 32
_MIN_ROWS = 16  # tl.dot wants at least 16 rows


@triton.jit
def _paged_attention_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    query,  # [num_tokens, num_heads, head_dim], heads contiguous
    keys,  # [num_blocks, num_kv_heads, block_size, head_dim], of floats
    values,
    query_start,  # int32 [num_seqs + 1]
    context_lens,  # int32 [num_seqs]
    block_tables,  # int32 [num_seqs, max_blocks]
    scale,
    softcap,  # read when has_softcap
    window,  # read when has_window
    query_stride,  # from token to token
    max_blocks,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,  # next power of two
    group: tl.constexpr,  # query heads per KV head
    num_rows: tl.constexpr,  # >= tile_tokens * group
    tile_tokens: tl.constexpr,
    tile_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_window: tl.constexpr,
):
    """A program: one sequence, one KV head, `tile_tokens` query tokens; row = token * group + head.

    All query heads that share a KV head are rows of one matrix, so each key is read once for them.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_token = tl.program_id(2) * tile_tokens
    start = tl.load(query_start + sequence)
    num_tokens = tl.load(query_start + sequence + 1) - start
    if first_token >= num_tokens:
        return
    context_len = tl.load(context_lens + sequence)

    rows = tl.arange(0, num_rows)
    token = first_token + rows // group
    head = kv_head * group + rows % group
    is_row = (rows < tile_tokens * group) & (token < num_tokens)
    dims = tl.arange(0, padded_dim)
    is_dim = dims < head_dim
    row_mask = is_row[:, None] & is_dim[None, :]
    q = tl.load(
        query
        + (start + token).to(tl.int64)[:, None] * query_stride
        + head[:, None] * head_dim
        + dims[None, :],
        mask=row_mask,
        other=0.0,
    )
    position = context_len - num_tokens + token  # of each row in its context
    last_token = tl.minimum(first_token + tile_tokens, num_tokens) - 1
    visible = context_len - num_tokens + last_token + 1  # keys before this one may be seen by some row
    first_key = 0
    if has_window:
        first_key = tl.maximum(context_len - num_tokens + first_token + 1 - window, 0)

    maximum = tl.full([num_rows], float("-inf"), tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    accumulator = tl.zeros([num_rows, padded_dim], tl.float32)
    for tile_start in range(first_key, visible, tile_keys):
        key_position = tile_start + tl.arange(0, tile_keys)
        is_key = key_position < visible
        block = tl.load(
            block_tables + sequence * max_blocks + key_position // block_size, mask=is_key, other=0
        ).to(tl.int64)
        offset = ((block * num_kv_heads + kv_head) * block_size + key_position % block_size) * head_dim
        key_mask = is_key[:, None] & is_dim[None, :]
        k = tl.load(keys + offset[:, None] + dims[None, :], mask=key_mask, other=0.0).to(q.dtype)
        # Slots past the context may hold NaN, so they must be read as 0, not weighted by 0.
        v = tl.load(values + offset[:, None] + dims[None, :], mask=key_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if has_softcap:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        is_seen = key_position[None, :] <= position[:, None]
        if has_window:
            is_seen &= key_position[None, :] > position[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row whose window begins after this tile has seen nothing yet: -inf - -inf would be NaN.
        subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        shrink = tl.exp(maximum - subtracted)
        weights = tl.exp(scores - subtracted[:, None])
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        accumulator += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum
    out = accumulator / total[:, None]
    target = ((start + token).to(tl.int64)[:, None] * num_heads + head[:, None]) * head_dim + dims[None, :]
    tl.store(output + target, out.to(output.dtype.element_ty), mask=row_mask)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Contract: `kernels.operators.Operators.paged_attention`. Raises ValueError for a cache in int8."""
    if key_cache.dtype == torch.int8:
        raise ValueError("attention in Triton has no KV cache in int8")
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    # A decode step needs one token per program, a prompt chunk fills 64 rows.
    wanted_rows = group if metadata.max_query_len == 1 else max(group, 64)
    num_rows = max(_MIN_ROWS, triton.next_power_of_2(wanted_rows))
    tile_tokens = num_rows // group
    output = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    grid = (metadata.num_seqs, num_kv_heads, triton.cdiv(metadata.max_query_len, tile_tokens))
    _paged_attention_kernel[grid](
        output,
        query,
        key_cache,
        value_cache,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables,
        scale,
        softcap or 1.0,
        window or 0,
        query.stride(0),
        metadata.block_tables.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        padded_dim=max(16, triton.next_power_of_2(head_dim)),
        group=group,
        num_rows=num_rows,
        tile_tokens=tile_tokens,
        tile_keys=_TILE_KEYS,
        has_softcap=softcap is not None,
        has_window=window is not None,
    )
    return output
