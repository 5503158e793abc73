"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")  # of the container, or of the whole machine where there is none


def free_memory_bytes(device: torch.device) -> int:
    """On a GPU its free memory; on a CPU what the kernel can give, within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(available_bytes(Path("/proc/meminfo")), container_headroom_bytes(_CGROUP))


def available_bytes(meminfo: Path) -> int:
    """MemAvailable: free memory and what the kernel can reclaim, proc(5)."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{meminfo} has no MemAvailable; set kv_cache_memory_bytes instead")


def container_headroom_bytes(cgroup: Path) -> int:
    """The limit of a version 2 control group less what is in use; without a limit, a very large number."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - used)
