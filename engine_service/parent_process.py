"""Bound to the parent: an engine must not outlive the supervisor that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Asks the kernel (prctl(2)) to kill this process when its parent ends; exits if it has ended already.

    The kernel watches the parent's *thread* that started us. Elsewhere than on Linux only
    `is_orphan` helps.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if is_orphan(parent_pid):
        raise SystemExit("the parent process has ended")


def is_orphan(parent_pid: int) -> bool:
    return os.getppid() != parent_pid
