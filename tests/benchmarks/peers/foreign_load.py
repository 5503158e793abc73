"""How much of the cores others took while something was measured.

All busy time of the machine, less that of the server, of the client and of this process. Time that a
hypervisor took away is foreign, too.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.peers.process_tree import TICKS_PER_S, cpu_seconds

BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # of proc_stat(5): user, nice, system, irq, softirq, steal


def machine_busy_seconds() -> float:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(int(fields[index]) for index in BUSY_FIELDS) / TICKS_PER_S


class ForeignLoad:
    """From its making to the call of `cores`. Children of this process that end in between count as ours."""

    def __init__(
        self,
        server_pid: int,
        busy_seconds: Callable[[], float] = machine_busy_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server_pid = server_pid
        self._busy_seconds = busy_seconds
        self._clock = clock
        self._began_s = clock()
        self._foreign_began_s = self._foreign_s()

    def cores(self) -> float:
        """Their mean share since it was made, in cores; 0 where the counters, read one by one, give less."""
        elapsed_s = self._clock() - self._began_s
        return max(0.0, (self._foreign_s() - self._foreign_began_s) / elapsed_s)

    def _foreign_s(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = os.times()
        ours = own.user + own.system + children.ru_utime + children.ru_stime
        return self._busy_seconds() - cpu_seconds(self._server_pid) - ours
