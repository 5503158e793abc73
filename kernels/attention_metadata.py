"""Where the tokens of one step sit: which rows belong to which sequence, and where their KV pages are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Built once per step and read by every layer.

    The step's tokens are flat: those of sequence i are rows `[query_start[i], query_start[i + 1])`, and
    they are the *last* tokens of its context. So row j of a sequence with q rows and a context of c
    tokens stands at position `c - q + j` and attends to the keys at positions `0 .. c - q + j`.

    The key at position p of sequence i lies in block `block_tables[i, p // block_size]` at offset
    `p % block_size`. Entries of `block_tables` past the last block of a sequence are never read.
    All tensors are contiguous and on the device of the cache.
    """

    query_start: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs]: tokens in the cache, this step's included
    block_tables: Tensor  # int32 [num_seqs, max_blocks_per_seq]
    slot_mapping: Tensor  # int64 [num_tokens]: block id * block_size + offset, of each token of the step
    max_query_len: int
    max_context_len: int

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]
