"""Memory for packed weights in huge pages: a layer of one row takes as long as reading its weights."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightMemory:
    """Hands out parts of large mappings, which stay as long as any of their parts does.

    Small allocations would never lie in huge pages (2 MiB), and reading through small pages is up to a third
    slower. The kernel gives memory to a mapping only when it is written: the unused end of one costs nothing.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 `[num_bytes]`, not initialised, aligned to a cache line."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._chunk):
            self._chunk = _mapped(max(rounded, _CHUNK_BYTES))
        part, self._chunk = self._chunk[:num_bytes], self._chunk[rounded:]
        return part


def _mapped(num_bytes: int) -> Tensor:
    # Private: for memory that could be shared, which is mmap's default, most kernels have no huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do, more slowly
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
