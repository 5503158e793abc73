"""The paged KV cache of one layer, as the C++ sees it (paged_cache.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from kernels.kv_vectors import head_dim_of

_TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2}  # KVType of paged_cache.h


class PagedCache(ctypes.Structure):
    """Keeps no tensor alive: its addresses are good as long as the tensors are."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("type", c_int32),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
    )

    @classmethod
    def takes(cls, keys: Tensor) -> bool:
        """Whether the C++ computes with a cache of this type."""
        return keys.dtype in _TYPES

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> PagedCache:
        """Contiguous `[num_blocks, num_kv_heads, block_size, width]`, of a type that it takes."""
        _, num_kv_heads, block_size, _ = keys.shape
        kv_type, head_dim = _TYPES[keys.dtype], head_dim_of(keys)
        return cls(keys.data_ptr(), values.data_ptr(), kv_type, num_kv_heads, block_size, head_dim)
