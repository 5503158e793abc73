"""How the generator itself was doing: its event loop, its processor time, its garbage collector.

A generator that is short of processor time sends late and reads late; both would be taken for the
server's slowness.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

LOOP_LAG_INTERVAL_S = 0.02


class CollectorPause(msgspec.Struct, frozen=True):
    t_begin_ns: int
    duration_ns: int


class GeneratorSamples(msgspec.Struct):
    """Of one process of the generator, over one run."""

    worker: int = 0
    loop_lags_ns: list[int] = []  # how late a timer fired, every 20 ms
    collector_pauses: list[CollectorPause] = []
    cpu_s: float = 0.0  # of this process, user and system
    wall_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        """Of one core; an event loop cannot use more."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0


@contextlib.contextmanager
def generator_sampling(clock_ns: Callable[[], int] = time.monotonic_ns) -> Iterator[GeneratorSamples]:
    """Fills the samples while the body runs in the event loop."""
    samples = GeneratorSamples()
    ticker = _Ticker(samples.loop_lags_ns)
    collector = _CollectorWatch(samples.collector_pauses, clock_ns)
    begin_cpu_s, begin_s = time.process_time(), time.monotonic()
    ticker.start()
    gc.callbacks.append(collector)
    try:
        yield samples
    finally:
        gc.callbacks.remove(collector)
        ticker.stop()
        samples.cpu_s = time.process_time() - begin_cpu_s
        samples.wall_s = time.monotonic() - begin_s


class _Ticker:
    """A timer that is set anew each time it fires, and writes down how late that was."""

    def __init__(self, lags_ns: list[int]) -> None:
        self._lags_ns = lags_ns
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        self._due_s = time.monotonic() + LOOP_LAG_INTERVAL_S
        self._handle = self._loop.call_later(LOOP_LAG_INTERVAL_S, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        self._lags_ns.append(max(0, int((time.monotonic() - self._due_s) * 1e9)))
        self.start()


class _CollectorWatch:
    def __init__(self, pauses: list[CollectorPause], clock_ns: Callable[[], int]) -> None:
        self._pauses = pauses
        self._clock_ns = clock_ns
        self._t_begin_ns = 0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._t_begin_ns = self._clock_ns()
        else:
            self._pauses.append(CollectorPause(self._t_begin_ns, self._clock_ns() - self._t_begin_ns))
