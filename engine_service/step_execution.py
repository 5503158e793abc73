"""Where steps are computed: here, one after the other, or beside the planning of the next one.

The loop without overlap is the oracle: both give the same tokens. What makes them the same is that nothing
is sampled before the token before it is known. Only the forward pass of step N + 1 begins while the result
of step N is taken in; before it samples, it waits for that (`history_is_known`), so that penalties, bad
words and grammars see whole histories.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from engine_service.compute_thread import ComputeThread
from engine_service.runner import RowResults, Runner


class ExecutionEnded(Exception):  # noqa: N818 - says what happened
    """The engine was closed, or a step before this one failed."""


class RunningStep(Protocol):
    def result(self) -> RowResults:
        """Waits for what `Runner.execute` returns, and raises what it raises."""

    def history_is_known(self) -> None:
        """The result was taken in, so the next step may sample."""


class StepExecution(Protocol):
    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may have been started whose result was not taken in; 1: no overlap."""

    def start(self, runner: Runner[Any], prepared: Any) -> RunningStep:
        """`prepared` is what the runner has made of the plan."""

    def close(self) -> None:
        """Nothing that was started is waited for any more."""


class _Done:
    def __init__(self, results: RowResults) -> None:
        self._results = results

    def result(self) -> RowResults:
        return self._results

    def history_is_known(self) -> None:
        pass


class InlineExecution:
    """In the thread that plans."""

    max_steps_in_flight = 1

    def start(self, runner: Runner[Any], prepared: Any) -> RunningStep:
        return _Done(runner.execute(prepared))

    def close(self) -> None:
        pass


class OverlappedExecution:
    """In a thread of its own, so that the next step can be planned meanwhile. Two steps at most."""

    max_steps_in_flight = 2

    def __init__(self, compute: ComputeThread) -> None:
        """`compute` is the thread that has loaded the model; it runs nothing else from now on."""
        self._compute = compute
        self._changed = threading.Condition()
        self._num_started = 0
        self._num_known = 0  # steps whose result was taken in
        self._has_ended = False

    def start(self, runner: Runner[Any], prepared: Any) -> RunningStep:
        num_before = self._num_started
        self._num_started += 1
        return _Overlapped(
            self._compute.start(lambda: self._run(runner, prepared, num_before)), self._taken_in
        )

    def close(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _taken_in(self) -> None:
        with self._changed:
            self._num_known += 1
            self._changed.notify_all()

    def _run(self, runner: Runner[Any], prepared: Any, num_before: int) -> RowResults:
        def await_history() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended or self._num_known == num_before)
                if self._has_ended:
                    raise ExecutionEnded

        try:
            if self._has_ended:
                raise ExecutionEnded
            return runner.execute(prepared, await_history)
        except BaseException:
            self._has_ended = True  # what was planned on top of it must not run
            raise


@dataclass(frozen=True, slots=True)
class _Overlapped:
    """One step in the compute thread."""

    future: Future[RowResults]
    taken_in: Callable[[], None]

    def result(self) -> RowResults:
        return self.future.result()

    def history_is_known(self) -> None:
        self.taken_in()
