"""Estimates and tests from sums by cluster. The tests may be looked at as often as one likes.

*Variance.* A variant's mean is a ratio of two sums over clusters of independent subjects; its variance is
that of the linearised ratio (Cochran, Sampling Techniques, §6; in econometrics "cluster-robust").

*Test.* A normal mixture: the likelihood ratio of "the difference is drawn from N(0, τ²)" to "there is none",
for an estimate that is normal with the variance above. Under "there is none" it is a martingale of mean 1, so
the chance that it ever exceeds 1/α is α at most, however often and whenever one looks (Robbins 1970; Johari,
Koomen, Pekelis & Walsh 2017, who call it mSPRT). Such estimates are normal, and their variance is known, only
in the limit, so the interval is an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy and
Ramdas 2024): not for a handful of subjects, see MIN_EFFECTIVE_CLUSTERS. τ says for which differences it is
quickest; every other τ would be as valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from shared.experiment_figures import (
    ClusterSums,
    Histogram,
    SplitFigures,
    add_counts,
    bin_edge_s,
    bin_of,
)

MIN_EFFECTIVE_CLUSTERS = 30.0  # in each variant, before anything is said
POWER = 0.8  # with which a difference is found that is called detectable
SPLIT_MIXTURE_SUBJECTS = 1000  # the shares' τ: what so many subjects could just show

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Mean:
    """Of one metric and variant. The variance is that of the mean."""

    value: float
    variance: float
    weight: float
    num_effective_clusters: float  # as if there were so many of equal weight

    def interval(self, alpha: float) -> tuple[float, float]:
        """Of one look, unlike the intervals of differences."""
        radius = _t_quantile(1 - alpha / 2, self.num_effective_clusters - 1) * math.sqrt(self.variance)
        return self.value - radius, self.value + radius


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a variant's mean to the control's. The interval and the p-value hold at all times together."""

    value: float
    standard_error: float
    low: float
    high: float
    p_value: float
    detectable: float  # the smallest true difference that would be found by now, with POWER
    missing_factor: float  # how many times the subjects there are would do for τ; 1: there are enough


@dataclass(frozen=True, slots=True)
class SplitTest:
    """Whether subjects come as the weights say. The p-value holds at all times together."""

    chi_square: float
    degrees_of_freedom: int
    p_value: float


def clustered_mean(given: ClusterSums) -> Mean | None:
    """None: there are fewer than two clusters with anything in them."""
    filled = [(weight, product) for weight, product in zip(given.weights, given.sums, strict=True) if weight]
    if len(filled) < 2:
        return None
    total = math.fsum(weight for weight, _ in filled)
    value = math.fsum(product for _, product in filled) / total
    squares = math.fsum((product - value * weight) ** 2 for weight, product in filled)
    variance = len(filled) / (len(filled) - 1) * squares / total**2
    return Mean(value, variance, total, total**2 / math.fsum(weight**2 for weight, _ in filled))


def difference(
    control: Mean, treated: Mean, *, tau: float, alpha: float, shares_variance: bool
) -> Difference | None:
    """None: nothing varies, so nothing can be compared.

    `shares_variance`: for what happens rarely. A small variant in which it has not happened at all has no
    variance of its own, and would be too sure of that: each has at least the variance of both together.
    """
    variances = [control.variance, treated.variance]
    if shares_variance:
        both = [control, treated]
        # of one unit of weight; the variance of a mean is about so much by its weight
        pooled = sum(mean.variance * mean.weight**2 for mean in both) / sum(mean.weight for mean in both)
        variances = [max(mean.variance, pooled / mean.weight) for mean in both]
    variance = sum(variances)
    if variance <= 0:
        return None
    value, standard_error = treated.value - control.value, math.sqrt(variance)
    radius = mixture_radius(standard_error, tau, alpha)
    return Difference(
        value=value,
        standard_error=standard_error,
        low=value - radius,
        high=value + radius,
        p_value=_p_value(log_mixture_ratio(value**2 / variance, tau**2 / variance, 1)),
        detectable=_detectable(standard_error, tau, alpha),
        missing_factor=_missing_factor(standard_error, tau, alpha),
    )


def log_mixture_ratio(chi_square: float, ratio: float, degrees_of_freedom: int) -> float:
    """Logarithm of the likelihood ratio. `ratio`: τ² by the variance of the estimate."""
    return 0.5 * (chi_square * ratio / (1 + ratio) - degrees_of_freedom * math.log1p(ratio))


def mixture_radius(standard_error: float, tau: float, alpha: float) -> float:
    """Half of the interval that holds those differences whose likelihood ratio is below 1/α."""
    ratio = (tau / standard_error) ** 2
    return standard_error * math.sqrt((1 + 1 / ratio) * (math.log1p(ratio) - 2 * math.log(alpha)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted, in the same order: whichever is below α may be called, with a chance of α that any is false
    (Holm 1979). Always-valid p-values stay so."""
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def split_test(split: SplitFigures) -> SplitTest | None:
    """A chi-square test of the subjects that each variant got against those that the weights gave it, made
    valid at all times by a mixture (in the manner of Lindon & Malek 2022). None: there is nothing to test."""
    names = [name for name, expected in split.expected.items() if expected > 0]
    if len(names) < 2:
        return None
    excess = [split.counted.get(name, 0) - split.expected[name] for name in names]
    covariance = [  # of independent draws, each with shares of its own
        [
            (split.expected[row] if row == column else 0.0) - split.products[row].get(column, 0.0)
            for column in names
        ]
        for row in names
    ]
    chi_square, degrees_of_freedom = _quadratic_form(excess, covariance)
    if degrees_of_freedom == 0:
        return None
    ratio = sum(split.counted.values()) / SPLIT_MIXTURE_SUBJECTS
    return SplitTest(
        chi_square, degrees_of_freedom, _p_value(log_mixture_ratio(chi_square, ratio, degrees_of_freedom))
    )


# ------------------------------------------------------------------------------------------ quantiles


@dataclass(frozen=True, slots=True)
class Quantile:
    """Of a time in seconds, with an interval of one look. `high` is None where the data do not bound it."""

    value: float
    low: float
    high: float | None


def quantile(groups: Sequence[Histogram], share: float, alpha: float) -> Quantile | None:
    """Woodruff's interval (1952): that of the share below the quantile, from groups of subjects, mapped back
    through the histogram. None: there are too few values."""
    whole: Histogram = {}
    for group in groups:
        add_counts(whole, group)
    total = sum(whole.values())
    filled = [group for group in groups if group]
    if total < 2 or len(filled) < 2:
        return None
    value = _time_at(whole, share * total)
    squares = math.fsum((_count_below(group, value) - share * sum(group.values())) ** 2 for group in filled)
    error = math.sqrt(len(filled) / (len(filled) - 1) * squares) / total
    radius = _t_quantile(1 - alpha / 2, len(filled) - 1) * error
    radius = max(radius, 0.5 / total)
    high = share + radius
    return Quantile(
        value,
        _time_at(whole, max(share - radius, 0.0) * total),
        _time_at(whole, high * total) if high < 1 else None,
    )


def _time_at(histogram: Mapping[int, int], rank: float) -> float:
    """The time below which there are so many, taken to be even (in logarithms) within a bin."""
    below = 0
    number = 0
    for number in sorted(histogram):
        count = histogram[number]
        if below + count >= rank:
            break
        below += count
    within = min(1.0, (rank - below) / histogram[number])
    return bin_edge_s(number) * math.pow(bin_edge_s(number + 1) / bin_edge_s(number), within)


def _count_below(histogram: Mapping[int, int], time_s: float) -> float:
    number = bin_of(time_s)
    whole = sum(count for bin_, count in histogram.items() if bin_ < number)
    width = math.log(bin_edge_s(number + 1) / bin_edge_s(number))
    within = math.log(time_s / bin_edge_s(number)) / width
    return whole + histogram.get(number, 0) * within


# ------------------------------------------------------------------------------------------ inner parts


def _quadratic_form(vector: Sequence[float], matrix: Sequence[Sequence[float]]) -> tuple[float, int]:
    """vᵀ M⁻ v for a covariance matrix and a vector that it can produce, and the matrix's rank: by eliminating
    the largest variance that is left, until none is."""
    rest, rows = list(vector), [list(row) for row in matrix]
    left = set(range(len(rest)))
    negligible = 1e-9 * max(rows[index][index] for index in left)
    form, rank = 0.0, 0
    while left:
        pivot = max(left, key=lambda index: rows[index][index])
        variance = rows[pivot][pivot]
        if variance <= negligible:
            break
        left.remove(pivot)
        form += rest[pivot] ** 2 / variance
        rank += 1
        for row in left:
            factor = rows[row][pivot] / variance
            rest[row] -= factor * rest[pivot]
            for column in left:
                rows[row][column] -= factor * rows[pivot][column]
    return form, rank


def _p_value(log_ratio: float) -> float:
    return math.exp(-max(0.0, log_ratio))


def _detectable(standard_error: float, tau: float, alpha: float) -> float:
    return mixture_radius(standard_error, tau, alpha) + _NORMAL.inv_cdf(POWER) * standard_error


def _missing_factor(standard_error: float, tau: float, alpha: float) -> float:
    """The variance falls as the subjects grow: found by halving, since `_detectable` falls with it."""
    if _detectable(standard_error, tau, alpha) <= tau:
        return 1.0
    low, high = 1.0, 1.0
    while _detectable(standard_error / math.sqrt(high), tau, alpha) > tau:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        if _detectable(standard_error / math.sqrt(middle), tau, alpha) > tau:
            low = middle
        else:
            high = middle
    return high


def _t_quantile(share: float, degrees_of_freedom: float) -> float:
    """Student's, by the series of Cornish and Fisher around the normal one (Abramowitz & Stegun 26.7.5)."""
    z, n = _NORMAL.inv_cdf(share), max(degrees_of_freedom, 1.0)
    terms: list[Any] = [
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    ]
    return float(sum(term / n**power for power, term in enumerate(terms)))
