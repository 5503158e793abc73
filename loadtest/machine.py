"""Where a figure was measured: a number without its machine and commit says little."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the load generator, which need not be that of the server."""

    cpu_model: str
    num_cores: int  # that this process may use
    memory_bytes: int | None
    system: str
    python: str


def describe_machine() -> Machine:
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=_num_cores(),
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


def checkout_commit() -> str | None:
    """The commit of the Git checkout that this code runs from, with `-dirty` for changes to it.

    None outside a checkout: a file that Git does not track may lie in somebody else's repository.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
