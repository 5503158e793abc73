"""The thread that computes: its jobs, its end, and that nothing of it is left over."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest

from engine_service import LLM, SamplingParams
from engine_service.compute_thread import ComputeThread, ThreadEnded
from engine_service.fake_runner import FakeRunner
from engine_service.offline.failures import EngineFailedError


def test_it_ends_after_the_jobs_that_were_started() -> None:
    thread = ComputeThread()
    may_go_on = threading.Event()
    done: list[int] = []
    thread.start(lambda: may_go_on.wait(10))
    thread.start(lambda: done.append(1))
    thread.close()
    thread.close()
    with pytest.raises(ThreadEnded):
        thread.start(lambda: done.append(2))
    may_go_on.set()
    thread.join(10)
    assert done == [1]
    assert not thread._thread.is_alive()


def test_a_job_may_close_the_thread_it_runs_in() -> None:
    thread = ComputeThread()

    def job() -> None:
        thread.close()
        thread.join(10)

    thread.call(job)
    thread.join(10)
    assert not thread._thread.is_alive()


class _Result:
    pass


def test_a_result_lives_no_longer_than_its_future() -> None:
    thread = ComputeThread()
    result = thread.call(_Result)
    left = weakref.ref(result)
    del result
    thread.call(lambda: None)
    assert left() is None
    thread.close()


def ask(llm: LLM) -> None:
    with contextlib.suppress(EngineFailedError):
        llm.generate("water", SamplingParams(max_tokens=1000), use_tqdm=False)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("use", ["unused", "used", "in the middle of a step"])
def test_an_engine_that_was_shut_down_leaves_no_thread_and_no_model(
    monkeypatch: pytest.MonkeyPatch, async_scheduling: bool, use: str
) -> None:
    runners: list[weakref.ref[FakeRunner]] = []
    computes = threading.Event()
    make, execute = FakeRunner.__init__, FakeRunner.execute

    def make_watched(runner: FakeRunner, *arguments: Any, **options: Any) -> None:
        runners.append(weakref.ref(runner))
        make(runner, *arguments, **options)

    def execute_watched(runner: FakeRunner, *arguments: Any) -> Any:
        computes.set()
        return execute(runner, *arguments)

    monkeypatch.setattr(FakeRunner, "__init__", make_watched)
    monkeypatch.setattr(FakeRunner, "execute", execute_watched)
    before = set(threading.enumerate())
    llm = LLM("fake:step_delay_ms=20", async_scheduling=async_scheduling)
    if use == "used":
        llm.generate("water", SamplingParams(max_tokens=3), use_tqdm=False)
    elif use == "in the middle of a step":
        threading.Thread(target=ask, args=(llm,), name="asking").start()
        assert computes.wait(10)
    llm.shutdown()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "asking":
            thread.join(10)
    del llm
    gc.collect()
    assert not set(threading.enumerate()) - before
    (runner,) = runners
    assert runner() is None
