"""How the KV cache stores a key or a value: in plain torch, as every back end has to.

Floats are rounded to the nearest. In int8 each vector has a scale of its own: its largest magnitude becomes
127, and the scale stands behind the numbers, as the four bytes of a float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCALE_BYTES = 4
_LARGEST_FLOAT16 = 65504.0


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a vector of `head_dim` takes in the cache."""
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def head_dim_of(cache: Tensor) -> int:
    """Of a cache whose last dimension is one vector."""
    return cache.shape[-1] - (_SCALE_BYTES if cache.dtype == torch.int8 else 0)


def store_vectors(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., head_dim]` as `[..., stored_width]` of `dtype`.

    What is too large for float16 becomes the largest that it has: an infinite key would spoil its sequence.
    In int8 a vector with a number that is not finite becomes NaN as a whole.
    """
    if dtype == torch.float16:
        return vectors.clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16).to(dtype)
    if dtype != torch.int8:
        return vectors.to(dtype)
    wide = vectors.float()
    is_finite = wide.isfinite().all(-1, keepdim=True)
    scales = (wide.abs().amax(-1, keepdim=True) / 127).where(is_finite, torch.nan)
    # Of a subnormal scale the inverse may be infinite, and such a vector is as good as zero.
    inverses = (1 / scales).where(scales >= torch.finfo(torch.float32).tiny, 0.0)
    numbers = (wide * inverses).round().where(is_finite, 0.0).to(torch.int8)
    return torch.cat((numbers, scales.contiguous().view(torch.int8)), dim=-1)


def load_vectors(stored: Tensor) -> Tensor:
    """float32 `[..., head_dim]` of `[..., stored_width]`."""
    if stored.dtype != torch.int8:
        return stored.float()
    numbers = stored[..., :-_SCALE_BYTES]
    scales = stored[..., -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    return numbers.float() * scales.view(torch.float32)
