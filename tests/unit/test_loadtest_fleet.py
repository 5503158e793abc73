"""How a load is dealt to several processes."""

from __future__ import annotations

import pytest

from loadtest.client import Target
from loadtest.datasets.prompt import Conversation, Item, Prompt, Turn
from loadtest.fleet import deal, num_shares
from loadtest.generator import ClosedLoop, OpenLoop

TARGET = Target("http://127.0.0.1:1/v1/completions", "openai", "m")
TALK = Conversation((Turn("a", 1), Turn("b", 1)))
ITEMS: list[Item] = [Prompt([index], 1) for index in range(3)] + [TALK] + [Prompt([9], 1)] * 3


def test_every_item_is_dealt_once_with_its_time_and_its_index() -> None:
    offsets = [index * 10 for index in range(7)]
    jobs = deal(TARGET, ITEMS, OpenLoop(offsets), 3)
    assert [len(job.items) for job in jobs] == [3, 2, 2]
    dealt = sorted(
        (index, offset, str(item))
        for job in jobs
        for index, offset, item in zip(job.indices, job.offsets_ns or [], job.items, strict=True)
    )
    # The conversation's two turns have the indices 3 and 4.
    assert dealt == sorted(zip([0, 1, 2, 3, 5, 6, 7], offsets, map(str, ITEMS), strict=True))
    assert all(job.schedule.max_concurrency is None for job in jobs if isinstance(job.schedule, OpenLoop))


@pytest.mark.parametrize(("concurrency", "num_workers", "shares"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1])])
def test_concurrency_is_divided_and_nobody_gets_none(
    concurrency: int, num_workers: int, shares: list[int]
) -> None:
    jobs = deal(TARGET, ITEMS, ClosedLoop(concurrency), num_workers)
    assert [job.schedule for job in jobs] == [ClosedLoop(share) for share in shares]
    capped = deal(TARGET, ITEMS, OpenLoop([0] * 7, concurrency), num_workers)
    assert [job.concurrency for job in capped] == shares


def test_there_are_no_more_processes_than_requests_at_once() -> None:
    assert num_shares(ITEMS[:3], OpenLoop([0] * 3), 8) == 3
    assert num_shares(ITEMS, ClosedLoop(2), 8) == 2


def test_there_are_no_more_jobs_than_items() -> None:
    assert len(deal(TARGET, ITEMS[:2], OpenLoop([0, 0]), 5)) == 2
