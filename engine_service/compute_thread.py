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
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


class ComputeThread:
    """Runs jobs one after the other. A daemon: a job that never returns does not keep the process."""

    def __init__(self, name: str = "compute") -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, job: Callable[[], Result]) -> Result:
        """Waits for the job, and returns its result or raises its error."""
        return self.start(job).result()

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._last = future
        self._jobs.put((future, job))
        return future

    def join(self, timeout_s: float) -> None:
        """Waits for the jobs that were started, for so long."""
        if self._last is not None:
            wait([self._last], timeout_s)

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:  # belongs to whoever asked for the job
                future.set_exception(error)
            del future, job  # lest the last result lives as long as this thread waits
