"""The processors that this process may compute on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # of the container, or of the whole machine where there is none
_TOPOLOGY = Path("/sys/devices/system/cpu")


def num_compute_cores() -> int:
    """Cores for threads that are always busy: hardware threads of one core count once.

    Within the affinity of this process and the quota of its container (`docker run --cpus`): threads beyond
    the quota would only use it up sooner, and then all of them stand still.
    """
    processors = usable_processors()
    most = min(num_cores(processors, _TOPOLOGY), quota(_CGROUP))
    return max(1, math.ceil(most))


def usable_processors() -> list[int]:
    """Their numbers, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_cores(processors: Iterable[int], topology: Path) -> int:
    """How many different cores these processors belong to; `topology`: /sys/devices/system/cpu."""
    return len({_siblings(processor, topology) for processor in processors})


def _siblings(processor: int, topology: Path) -> str:
    """The processors of the same core, as Linux lists them; without that, of itself."""
    try:
        return (topology / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def quota(cgroup: Path) -> float:
    """Processors' worth of time that a version 2 control group gets; infinity without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
