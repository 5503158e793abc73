"""The paged KV cache of one layer, as the C++ sees it (paged_cache.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p

from torch import Tensor


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
    def of(cls, keys: Tensor, values: Tensor) -> PagedCache:
        """Contiguous `[num_blocks, num_kv_heads, block_size, head_dim]`, float32."""
        _, num_kv_heads, block_size, head_dim = keys.shape
        return cls(keys.data_ptr(), values.data_ptr(), 0, num_kv_heads, block_size, head_dim)
