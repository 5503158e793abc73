"""The one thread that computes.

OpenMP keeps a team of worker threads for each thread that calls it. If one thread loaded the weights
and another made the steps, there would be two teams on the same cores, and GNU OpenMP, seeing more
threads than cores, would let waiting ones sleep at once: a decode step of the default model took 42 ms
instead of 28. The number of threads that torch uses is also a property of the calling thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class ThreadEnded(RuntimeError):  # noqa: N818 - says what happened
    """A job came after `close`."""


class ComputeThread:
    """Runs jobs one after the other. A daemon: a job that never returns does not keep the process.

    It ends after `close`. Whoever makes one closes it, and waits for its end where what the jobs use has to
    outlive them: an interpreter that ends under a running operator of torch aborts the process.
    """

    def __init__(self, name: str = "compute") -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # no job may come behind the end
        self._is_closed = False
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def call(self, job: Callable[[], Result]) -> Result:
        """Waits for the job, and returns its result or raises its error. Raises ThreadEnded."""
        return self.start(job).result()

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """Raises ThreadEnded."""
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closed:
                raise ThreadEnded(f"the thread {self._thread.name!r} takes no more jobs")
            self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """No more jobs: the thread ends after those that were started. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the end, for so long, after `close`. In the thread itself: not at all."""
        assert self._is_closed, "a thread that may get more jobs does not end"
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _work(jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := jobs.get()) is not None:
        future, job = item
        try:
            future.set_result(job())
        except BaseException as error:  # belongs to whoever asked for the job
            future.set_exception(error)
        del item, future, job  # lest the last result lives as long as this thread waits
