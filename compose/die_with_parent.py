"""Run a program that the kernel kills when its parent dies: `die_with_parent.py PARENT_PID PROGRAM ...`.

A parent that is killed with SIGKILL can clean up nothing, so its children have to be told by the
kernel (prctl(2), PR_SET_PDEATHSIG). The setting survives exec, which makes this work for programs
that are not ours. It is bound to the parent *thread*: the parent must start its children from a
thread that lives as long as it does.

Executed as a script, with nothing but the standard library, so that it costs about 20 ms per child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def bound_to_this_process(program: Sequence[str]) -> list[str]:
    """The command line that runs `program` as a child that cannot outlive the calling process."""
    # -I and -S: neither the working directory nor site-packages may change what this script imports.
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *program]


def main(arguments: Sequence[str]) -> None:
    """Becomes the program. Returns if the parent is already gone; exits with 127 if there is no program."""
    parent_pid, *program = arguments
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent_pid):  # it died before the line above took effect
        return
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from error


if __name__ == "__main__":
    main(sys.argv[1:])
