"""A process and all that descend from it: their CPU time and their memory, read from /proc."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SAMPLE_INTERVAL_S = 2.0  # a sample walks the page tables: some ms for each GB


@dataclass(frozen=True, slots=True)
class _Stat:
    """Of proc_pid_stat(5)."""

    parent: int
    cpu_ticks: int  # its own, and its children's that have ended and were waited for


def descendants(root: int) -> list[int]:
    """`root` and all below it that live now, empty once it has ended."""
    children: dict[int, list[int]] = {}
    for pid, stat in _all_stats().items():
        children.setdefault(stat.parent, []).append(pid)
    found = [root] if (PROC / str(root)).exists() else []
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> float:
    """User and system time of the tree since it began, with what has ended in it meanwhile."""
    stats = _all_stats()
    return sum(stats[pid].cpu_ticks for pid in descendants(root) if pid in stats) / TICKS_PER_S


def pss_bytes(pid: int) -> int:
    """Proportional set size: of shared pages its part, so that a sum counts each page once. 0 if it ended."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    tree_bytes: int = 0
    largest_process_bytes: int = 0
    by_process: Mapping[str, int] = field(default_factory=dict)  # at the tree's peak: "pid name" -> bytes


class MemorySampler:
    """Looks at a tree every two seconds from a thread of its own, and remembers the peak. Use with `with`."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._peak = MemoryPeak()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def peak(self) -> MemoryPeak:
        """So far, with a look now."""
        self._look()
        return self._peak

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        found = {pid: pss_bytes(pid) for pid in descendants(self._root)}
        with self._lock:
            largest = max(self._peak.largest_process_bytes, *found.values(), 0)
            tree = sum(found.values())
            if tree > self._peak.tree_bytes:
                named = {f"{pid} {_name_of(pid)}": size for pid, size in found.items()}
                self._peak = MemoryPeak(tree, largest, named)
            else:
                self._peak = MemoryPeak(self._peak.tree_bytes, largest, self._peak.by_process)


def _all_stats() -> dict[int, _Stat]:
    stats = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:  # it has ended
                continue
            # The name may hold spaces and parentheses; the fields begin after its last parenthesis.
            fields = text.rpartition(")")[2].split()
            stats[int(entry.name)] = _Stat(int(fields[1]), sum(map(int, fields[11:15])))
    return stats


def _name_of(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return " ".join(Path(word.decode(errors="replace")).name for word in words[:4] if word)
