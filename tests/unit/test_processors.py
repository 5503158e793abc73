"""Which cores compute: within affinity and a container's quota, each core once."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.processors import (
    nodes_of,
    num_compute_cores,
    num_cores,
    numa_nodes,
    parse_processors,
    quota,
    stay_on,
    usable_processors,
)


def write_topology(path: Path, siblings: dict[int, str]) -> Path:
    for processor, listed in siblings.items():
        folder = path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{listed}\n")
    return path


@pytest.mark.parametrize(
    ("text", "expected"), [("3", [3]), ("0-3,8", [0, 1, 2, 3, 8]), ("5, 1-2,2", [1, 2, 5])]
)
def test_lists_of_processors(text: str, expected: list[int]) -> None:
    assert parse_processors(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1-2-3", "999999"])
def test_what_is_no_list_of_processors(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_processors(text)


def test_a_processor_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="may not run on the processors 99999"):
        stay_on([usable_processors()[0], 99999])


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    topology = write_topology(tmp_path, {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"})
    assert num_cores([0, 1, 4, 5], topology) == 2
    assert num_cores([0, 4], topology) == 1
    assert num_cores([0, 5], topology) == 2


def test_processors_by_the_node_that_they_belong_to(tmp_path: Path) -> None:
    for node, processors in {"node0": "0-3,8-11", "node1": "\n", "node10": "12", "node2": "4-7"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{processors}\n")
    assert nodes_of([0, 3, 5, 6, 8, 12], tmp_path) == [[0, 3, 8], [5, 6], [12]]
    assert nodes_of([5], tmp_path) == [[5]]
    assert nodes_of([5, 99], tmp_path) == [[5, 99]]  # what the system does not tell is not guessed


def test_without_nodes_all_processors_are_one(tmp_path: Path) -> None:
    assert nodes_of([2, 1], tmp_path) == [[1, 2]]
    assert sorted(itertools.chain(*numa_nodes())) == usable_processors()


def test_without_a_topology_every_processor_is_a_core(tmp_path: Path) -> None:
    assert num_cores([0, 1, 2], tmp_path) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", math.inf),
        ("250000 100000", 2.5),
        ("50000 100000", 0.5),
        ("nonsense", math.inf),
        ("1 0", math.inf),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, text: str, expected: float) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert quota(tmp_path) == expected


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert quota(tmp_path) == math.inf


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities")
def test_the_affinity_of_this_process_bounds_it() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_processors() == [min(before)]
        assert num_compute_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
