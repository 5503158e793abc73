"""The number of compute threads: the most, unless fewer are clearly faster."""

from __future__ import annotations

import pytest

from engine_service.thread_choice import fastest, thread_candidates


@pytest.mark.parametrize(("most", "candidates"), [(1, [1]), (3, [3]), (4, [4, 2, 1]), (64, [64, 32, 16])])
def test_a_measurement_is_made_where_it_can_matter(most: int, candidates: list[int]) -> None:
    assert thread_candidates(most) == candidates


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({8: 1.0, 4: 1.2, 2: 2.0}, 8),
        ({8: 1.0, 4: 0.95, 2: 2.0}, 8),  # within the noise
        ({8: 1.0, 4: 0.7, 2: 0.69}, 4),
        ({8: 9.0, 4: 5.0, 2: 2.0}, 2),
    ],
)
def test_fewer_threads_have_to_be_clearly_faster(times: dict[int, float], chosen: int) -> None:
    assert fastest([8, 4, 2], times.__getitem__) == chosen


def test_a_slow_moment_does_not_decide() -> None:
    times = iter([9.0, 1.0, 1.0, 1.1, 1.0, 1.1])
    assert fastest([4, 2], lambda _: next(times)) == 4
