"""The threads of the CPU kernels: calls from several threads take turns, and threads end with their team."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.cpu.packed_linear import LinearLibrary, PackedLinear
from kernels.cpu.team import Team
from kernels.quantized_reference import quantize_weight

TASKS = Path("/proc/self/task")


@pytest.fixture(scope="module")
def library() -> LinearLibrary:
    return LinearLibrary()


def threads() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


@pytest.mark.skipif(not TASKS.exists(), reason="no /proc")
@pytest.mark.parametrize("spin_us", [0, 50])
def test_the_threads_of_a_team_end_with_it(library: LinearLibrary, spin_us: int) -> None:
    before = threads()
    team = Team(3, library=library.library, spin_us=spin_us)
    own = threads() - before
    assert len(own) == 2
    del team
    gc.collect()
    deadline = time.monotonic() + 10
    while (
        own & threads() and time.monotonic() < deadline
    ):  # joined, but the kernel may list them a moment longer
        pass
    assert not own & threads()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities")
def test_a_team_may_be_told_where_its_threads_run(library: LinearLibrary) -> None:
    cpu = max(os.sched_getaffinity(0))
    before = threads()
    team = Team(2, library=library.library, cpus=[cpu])
    (own,) = threads() - before
    assert os.sched_getaffinity(int(own)) == {cpu}
    assert team.num_threads == 2


def test_calls_from_several_threads_do_not_meet(library: LinearLibrary) -> None:
    team = Team(2, library=library.library)
    weight = quantize_weight(
        torch.randn(600, 256, generator=torch.Generator().manual_seed(0)), "int8_group64"
    )
    layer = PackedLinear(weight, team=team, library=library)
    inputs = [
        torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)) for rows in (1, 3, 20, 70)
    ]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        results = [layer(inputs[index]) for _ in range(50)]
        wrong.extend(index for result in results if not torch.equal(result, expected[index]))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_what_makes_no_sense_is_named(library: LinearLibrary) -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        Team(0, library=library.library)
    with pytest.raises(ValueError, match="spin_us is -1"):
        Team(1, library=library.library, spin_us=-1)
    with pytest.raises(ValueError, match="cpus names 2 processors for 1 threads"):
        Team(2, library=library.library, cpus=[0, 1])
