"""Memory for packed weights in huge pages: a layer of one row takes as long as reading its weights."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from pathlib import Path

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
_HUGE_PAGE_BYTES = 2 << 20
_FAULT_WINDOW_BYTES = 64 << 10


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
            self._chunk = new_memory(max(rounded, _CHUNK_BYTES))
        part, self._chunk = self._chunk[:num_bytes], self._chunk[rounded:]
        return part


def file_in_memory(path: Path) -> Tensor:
    """The bytes of a file, uint8. Writing to them does not change the file. Raises OSError.

    Mapped where the kernel maps the file in huge pages (seen with ext4 on Linux 6.18): then the engines of a
    machine share the memory. Elsewhere copied into huge pages of this process.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes >= _HUGE_PAGE_BYTES:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            _ask_for_huge_pages(mapping)
            mapped = torch.frombuffer(mapping, dtype=torch.uint8)
            if _is_in_huge_pages(mapped):
                return mapped
            del mapped, mapping
        copy = new_memory(max(num_bytes, 1))[:num_bytes]
        file.readinto(copy.numpy().data)
        return copy


def _is_in_huge_pages(mapped: Tensor) -> bool:
    """Found by reading a byte in every window that a kernel makes ready at one page fault at most: in huge
    pages one window in 32 faults, in small ones each. To read what /proc tells of it takes 20 times as long.
    """
    windows = mapped.numpy()[::_FAULT_WINDOW_BYTES]
    before = _num_faults()
    windows.sum()
    return _num_faults() - before < len(windows) // 4


def _num_faults() -> int:
    usage = resource.getrusage(
        getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    )  # the former on Linux
    return usage.ru_minflt + usage.ru_majflt


def new_memory(num_bytes: int) -> Tensor:
    """uint8 `[num_bytes]`, zeros, in huge pages where they fit.

    The system has it back once no tensor of it is left; malloc keeps much of what is freed among what stays.
    """
    # Private: for memory that could be shared, which is mmap's default, most kernels have no huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _ask_for_huge_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do, more slowly
            memory.madvise(mmap.MADV_HUGEPAGE)
