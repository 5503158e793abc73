"""The processors that this process may compute on, and how it is kept to some of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from shared.errors import ConfigError

_PART = re.compile(r"(?P<first>\d{1,5})(-(?P<last>\d{1,5}))?")
_CGROUP = Path("/sys/fs/cgroup")  # of the container, or of the whole machine where there is none
_TOPOLOGY = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


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


def numa_nodes() -> list[list[int]]:
    """The processors of each NUMA node that this process may use; one node where a quota shares them out."""
    processors = usable_processors()
    if quota(_CGROUP) < len(processors):
        return [processors]
    return nodes_of(processors, _NODES)


def nodes_of(processors: Iterable[int], nodes: Path) -> list[list[int]]:
    """`processors` by the node that they belong to; `nodes`: /sys/devices/system/node."""
    usable = set(processors)
    found: list[list[int]] = []
    for file in sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:])):
        try:
            of_node = usable.intersection(parse_processors(file.read_text()))
        except (OSError, ValueError):  # ValueError: a node that has memory only
            continue
        if of_node:
            found.append(sorted(of_node))
    return found if sum(map(len, found)) == len(usable) else [sorted(usable)]


def parse_processors(text: str) -> list[int]:
    """Of a list as Linux writes it, such as "0-3,8". Raises ValueError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        if (match := _PART.fullmatch(part.strip())) is None:
            raise ValueError(f"{text!r} is no list of processors such as 0-3,8")
        first = int(match["first"])
        last = int(match["last"] or first)
        if last < first:
            raise ValueError(f"{text!r} has {part.strip()!r}, which ends before it begins")
        found.update(range(first, last + 1))
    return sorted(found)


def stay_on(processors: Iterable[int]) -> None:
    """Keeps this process to them, all threads that it starts from now on included. Raises ConfigError."""
    wanted, usable = set(processors), set(usable_processors())
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system does not let a process choose its processors", "cpus")
    if missing := sorted(wanted - usable):
        named = ", ".join(map(str, missing))
        raise ConfigError(
            f"this process may not run on the processors {named}; it may on {sorted(usable)}", "cpus"
        )
    os.sched_setaffinity(0, wanted)


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
