"""Stacks that the tests of several files use: each runs from its first use to the last test of its group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

S = TypeVar("S")


class SharedStacks:
    """Simple fixtures of the session would go on to its end, and a stack that is idle for ten minutes takes
    half a minute of a core.
    """

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}
        self._ends = ExitStack()

    def running(self, name: str, start: Callable[[], AbstractContextManager[S]]) -> S:
        """The one that runs by that name, or a new one."""
        if name not in self._running:
            self._running[name] = self._ends.enter_context(start())
        stack: S = self._running[name]
        return stack

    def end_all(self) -> None:
        self._running.clear()
        self._ends.close()
