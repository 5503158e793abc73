"""The Triton back end: attention and norms in Triton, the rest as torch's own GPU kernels."""

from __future__ import annotations

from torch import Tensor

from kernels.attention_metadata import AttentionMetadata
from kernels.reference import ReferenceOperators
from kernels.triton.attention import paged_attention
from kernels.triton.rms_norm import rms_norm


class TritonOperators(ReferenceOperators):
    """Contracts: `kernels.operators.Operators`. Runs on CPU tensors under TRITON_INTERPRET=1."""

    name = "triton"

    def __init__(self, num_threads: int = 1) -> None:
        """`num_threads` is for back ends on the CPU."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, residual, weight, eps)

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
        return paged_attention(query, key_cache, value_cache, metadata, scale, window=window, softcap=softcap)
