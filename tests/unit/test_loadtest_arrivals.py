"""Arrival processes: the seed fixes them, their rate and burstiness are what was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.arrivals import (
    Ramp,
    arrival_offsets_ns,
    arrival_offsets_within_ns,
    burstiness_of_cv,
    measured_cv,
    ramp_offsets_ns,
    ramp_offsets_within_ns,
)


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


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_coefficient_of_variation_is_the_one_asked_for(cv: float) -> None:
    offsets = arrival_offsets_ns(20_000, 200.0, burstiness_of_cv(cv), np.random.default_rng(11))
    assert measured_cv(offsets) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("rate", [50.0, 200.0, 500.0])
def test_poisson_arrivals_of_a_duration_have_its_count_and_exponential_gaps(rate: float) -> None:
    """Kolmogorov and Smirnov's test on the gaps, with p > 0.01; no stretching to the round number."""
    offsets = arrival_offsets_within_ns(30.0, rate, 1.0, np.random.default_rng(5))
    expected = 30 * rate
    assert abs(len(offsets) - expected) <= 3 * math.sqrt(expected)
    assert len(offsets) != expected
    assert offsets[-1] <= 30e9
    assert kolmogorov_smirnov_p(np.diff([0, *offsets]) / 1e9 * rate) > 0.01


def kolmogorov_smirnov_p(unit_gaps: np.ndarray) -> float:
    """Of gaps that should be exponential with mean 1 (Kolmogorov's limit)."""
    ordered = 1 - np.exp(-np.sort(unit_gaps))
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())
    terms = [(-1) ** (k - 1) * math.exp(-2 * k**2 * distance**2 * len(ordered)) for k in range(1, 100)]
    return 2 * sum(terms)


def test_the_test_on_gaps_sees_gaps_that_are_not_exponential() -> None:
    assert kolmogorov_smirnov_p(np.random.default_rng(5).gamma(1.2, 1 / 1.2, size=6000)) < 0.01


@pytest.mark.parametrize("ramp", [Ramp("linear", 10.0, 90.0), Ramp("exponential", 10.0, 90.0)])
def test_ramp_within_a_duration_has_its_rate_at_each_time(ramp: Ramp) -> None:
    offsets = np.array(ramp_offsets_within_ns(1000.0, ramp, 1.0, np.random.default_rng(2))) / 1e9
    for begin in (0, 300, 600, 900):
        num_arrivals = ((offsets >= begin) & (offsets < begin + 100)).sum()
        expected = sum(ramp.rate_at((begin + second) / 1000) for second in range(100))
        assert num_arrivals == pytest.approx(expected, rel=0.1)


def test_ramp_by_number_changes_the_rate_with_the_index_as_vllm_does() -> None:
    offsets = ramp_offsets_ns(10, Ramp("linear", 1.0, 11.0), math.inf, np.random.default_rng(0))
    assert np.diff([0, *offsets]) / 1e9 == pytest.approx([1 / (1 + index) for index in range(10)])
    offsets = ramp_offsets_ns(2, Ramp("exponential", 1.0, 4.0), math.inf, np.random.default_rng(0))
    assert np.diff([0, *offsets]) / 1e9 == pytest.approx([1.0, 0.5])


def test_flat_ramp_is_the_plain_process() -> None:
    flat = ramp_offsets_within_ns(9.0, Ramp("linear", 7.0, 7.0), 1.0, np.random.default_rng(4))
    assert flat == arrival_offsets_within_ns(9.0, 7.0, 1.0, np.random.default_rng(4))
