"""Arrival processes: the seed fixes them, their rate and burstiness are what was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.arrivals import arrival_offsets_ns


def gaps_s(rate: float, burstiness: float, num_requests: int = 40_000, seed: int = 7) -> np.ndarray:
    offsets = arrival_offsets_ns(num_requests, rate, burstiness, np.random.default_rng(seed))
    return np.diff([0, *offsets]) / 1e9


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_mean_gap_and_its_variation_follow_rate_and_burstiness(burstiness: float) -> None:
    gaps = gaps_s(rate=50.0, burstiness=burstiness)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_number_of_poisson_arrivals_varies_as_it_must() -> None:
    """Counts of one second each: variance equals the mean, so no stretching has taken it out."""
    seconds = np.floor(np.cumsum(gaps_s(rate=40.0, burstiness=1.0)))
    counts = np.unique(seconds, return_counts=True)[1][:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, rel=0.2)


def test_one_seed_gives_one_schedule_and_another_seed_another() -> None:
    assert (gaps_s(9.0, 1.0, 50, seed=1) == gaps_s(9.0, 1.0, 50, seed=1)).all()
    assert (gaps_s(9.0, 1.0, 50, seed=1) != gaps_s(9.0, 1.0, 50, seed=2)).any()


def test_due_times_ascend_and_are_whole_nanoseconds() -> None:
    offsets = arrival_offsets_ns(500, 1000.0, 0.3, np.random.default_rng(3))
    assert offsets == sorted(offsets)
    assert all(type(offset) is int for offset in offsets)


def test_infinite_burstiness_is_a_constant_pace_and_infinite_rate_is_all_at_once() -> None:
    rng = np.random.default_rng(0)
    assert arrival_offsets_ns(3, 4.0, math.inf, rng) == [250_000_000, 500_000_000, 750_000_000]
    assert arrival_offsets_ns(3, math.inf, 1.0, rng) == [0, 0, 0]
