"""The threads that our C++ kernels compute with (team.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from pathlib import Path

from kernels.cpu.build import built_library
from kernels.dispatch import BackEndUnavailable

_SPIN_US = 50
"""Longer than what lies between two pieces of work within a step; between steps they sleep."""


class Team:
    """The calling thread and `num_threads - 1` others, which end with the object.

    What is called with a team is cut into pieces; whoever is free takes the next one. Only the calling
    thread is needed: one that the machine holds up is not waited for, but for the piece that it has begun.
    Calls from several threads take turns. Threads that wait spin for `spin_us`, giving way to others, and
    then sleep. `cpus`, if given, names the processor of each thread but the first. Raises ValueError for
    numbers that make no sense.
    """

    def __init__(
        self,
        num_threads: int = 1,
        *,
        library: ctypes.CDLL | None = None,
        spin_us: int = _SPIN_US,
        cpus: Sequence[int] | None = None,
    ) -> None:
        """Raises BackEndUnavailable where the library cannot be built."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
        if spin_us < 0:
            raise ValueError(f"spin_us is {spin_us}; it must not be negative")
        if cpus is not None and len(cpus) != num_threads - 1:
            raise ValueError(f"cpus names {len(cpus)} processors for {num_threads - 1} threads")
        library = library or loaded_library(built_library())
        create, destroy = library.headrace_team_create, library.headrace_team_destroy
        create.argtypes, create.restype = [c_int, c_int, c_void_p], c_void_p
        destroy.argtypes, destroy.restype = [c_void_p], None
        self._library, self._spin_us = library, spin_us
        self._start(num_threads, cpus)

    def _start(self, num_threads: int, cpus: Sequence[int] | None) -> None:
        self.num_threads = num_threads
        processors = None if cpus is None else (c_int * len(cpus))(*cpus)
        self.address: int = self._library.headrace_team_create(num_threads, self._spin_us, processors)
        """Of the C++ object, for a call on this team: another one after `resize`."""
        self._end = weakref.finalize(self, self._library.headrace_team_destroy, self.address)

    def resize(self, num_threads: int) -> None:
        """Goes on with so many threads, not bound to processors. Not while a call runs."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
        self._end()
        self._start(num_threads, None)


def loaded_library(path: Path) -> ctypes.CDLL:
    """Raises BackEndUnavailable if it does not load."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackEndUnavailable(f"the compiled CPU kernels do not load: {error}") from error
