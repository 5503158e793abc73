"""What every back end can do: the operators of a decoder layer that are not matrix products."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.attention_metadata import AttentionMetadata


class Operators(Protocol):
    """Implementations agree with `kernels.reference` up to rounding.

    Layout of the KV cache of one layer: keys and values are each
    `[num_blocks, num_kv_heads, block_size, width]`, contiguous, of float32, float16, bfloat16 or int8; how a
    vector is rounded to them, and its width: `kernels.kv_vectors`. Head h of a query reads KV head
    `h // (num_heads // num_kv_heads)`. The last dimension of every argument has stride 1.
    """

    @property
    def name(self) -> str:
        """Of the back end, as `select_operators` knows it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension of `x` `[num_tokens, hidden]`.

        Computed in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467), rounded to the
        type of `weight` before it is multiplied with it, and returned in the type of `x`.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x`, in place; returns `rms_norm(residual)`. Both are `[num_tokens, hidden]`."""

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotates query `[num_tokens, num_heads, head_dim]` and key `[.., num_kv_heads, ..]` in place.

        positions is int64 `[num_tokens]`; cos and sin are float32 `[max_position, half]`. Dimension d is
        paired with `d + half`, as Hugging Face's "rotate half" has it; those from `2 * half` on stay as
        they are (Su et al. 2021, https://arxiv.org/abs/2104.09864).
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[num_tokens, 2 * width]` (gate first): `[num_tokens, width]`."""

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores `[num_tokens, num_kv_heads, head_dim]` at int64 slots `block * block_size + offset`."""

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_and_mul`, with the tanh approximation of GELU in place of SiLU."""

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
        """Causal attention of the whole batch, any mix of prompt chunks and single tokens.

        query is `[num_tokens, num_heads, head_dim]`; the step's own keys and values are in the cache
        already. Scores are `query · key * scale`. With a window (at least 1), a token at position p sees
        the keys at `p - window + 1 .. p` only. With a softcap (above 0), a score s becomes
        `softcap * tanh(s / softcap)`. Returns a new contiguous tensor of the query's shape.
        """
