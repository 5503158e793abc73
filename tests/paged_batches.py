"""Random paged batches for attention: caches full of NaN except where a sequence has written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_vectors import store_vectors


@dataclass(frozen=True, slots=True)
class PagedBatch:
    query: Tensor
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata
    scale: float


def make_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PagedBatch:
    """Sequences with blocks in random order; a kernel that reads a foreign slot meets NaN.

    `dtype` is that of the cache.
    """
    random = torch.Generator().manual_seed(seed)
    per_sequence = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(per_sequence) + 2
    order = torch.randperm(num_blocks, generator=random).int()
    longest = max(per_sequence, default=0)
    tables = torch.full((len(context_lens), longest), num_blocks * 1000, dtype=torch.int32)
    keys = torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"))
    values = keys.clone()
    slots: list[Tensor] = []
    taken = 0
    for index, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks = order[taken : taken + per_sequence[index]]
        taken += per_sequence[index]
        tables[index, : len(blocks)] = blocks
        positions = torch.arange(context_len)
        at = blocks.long()[positions // block_size], slice(None), positions % block_size
        keys[at] = 2 * torch.randn(context_len, num_kv_heads, head_dim, generator=random)
        values[at] = torch.randn(context_len, num_kv_heads, head_dim, generator=random)
        own = torch.arange(context_len - query_len, context_len)
        slots.append(blocks.long()[own // block_size] * block_size + own % block_size)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat([*slots, torch.empty(0, dtype=torch.int64)]),
        max_query_len=max(query_lens, default=0),
        max_context_len=max(context_lens, default=0),
    )
    # Strided as in the model, where the query is a slice of the fused q, k, v.
    num_tokens = sum(query_lens)
    wide = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=random)
    query = wide[:, : num_heads * head_dim].unflatten(-1, (num_heads, head_dim))
    stored = store_vectors(keys, dtype), store_vectors(values, dtype)
    return PagedBatch(query, *stored, metadata, head_dim**-0.5)
