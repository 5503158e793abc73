"""From the figures of an experiment to what can be said of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from compose.experiment.figures import ExperimentFigures
from compose.experiment.metric import DEFAULT_METRIC, METRICS, Kind, Metric
from compose.experiment.statistics import (
    MIN_EFFECTIVE_CLUSTERS,
    Difference,
    Mean,
    clustered_mean,
    difference,
    holm,
    quantile,
    split_test,
)
from shared.errors import ConfigError
from shared.experiment_figures import (
    RATES,
    TIMES,
    ClusterSums,
    CommentRecord,
    Histogram,
    RequestCounts,
    VariantFigures,
    add_counts,
    bin_edge_s,
)

MAX_SPLIT_P_VALUE = 0.001  # below it the split is called broken
QUANTILES = (0.5, 0.95, 0.99)


class Estimate(msgspec.Struct, frozen=True):
    """`high` None: the data do not bound it."""

    value: float
    low: float
    high: float | None


class Bin(msgspec.Struct, frozen=True):
    begin_s: float
    end_s: float
    count: int


class TimeReport(msgspec.Struct, frozen=True):
    """Seconds. The intervals are those of one look."""

    num_values: int
    geometric_mean: Estimate | None
    quantiles: dict[str, Estimate]  # by name, "p50"


class VariantReport(msgspec.Struct, frozen=True):
    variant: str
    is_control: bool
    num_subjects: int  # of those that count for the split
    assigned: RequestCounts
    served: RequestCounts
    times: dict[str, TimeReport]
    rates: dict[str, Estimate]
    num_feedback: int
    feedback: Estimate | None
    histograms: dict[str, list[Bin]]  # of the assigned requests


class Comparison(msgspec.Struct, frozen=True):
    """Of a variant to the control. Of times it is a ratio: 1.08 is 8 % longer. The interval and the p-values
    hold however often one looks; None: there is too little to compare."""

    metric: str
    variant: str
    kind: Kind
    estimate: Estimate | None = None
    p_value: float | None = None
    adjusted_p_value: float | None = None  # Holm's, among the primary metric's or among all others
    is_called: bool = False
    detectable: float | None = None  # as `estimate`, away from no difference
    wanted: float | None = None  # what `num_missing_subjects` are for
    num_missing_subjects: int | None = None
    why_not: str | None = None


class SplitReport(msgspec.Struct, frozen=True):
    is_broken: bool
    p_value: float | None  # None: there is nothing to test
    chi_square: float | None
    counted: dict[str, int]
    expected: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    route: str
    version: int
    is_in_force: bool  # this version; else the route has another one now, or is gone
    other_versions: list[int]  # of which there are figures, too
    made_at: float
    began_at: float
    updated_at: float
    alpha: float
    metric: str  # the primary one
    control: str
    num_subjects: int
    split: SplitReport
    variants: list[VariantReport]
    comparisons: list[Comparison]  # the primary metric's first
    comments: list[CommentRecord]


def make_report(
    figures: ExperimentFigures,
    *,
    metric: str = DEFAULT_METRIC,
    control: str | None = None,
    alpha: float = 0.05,
    clock: Callable[[], float] = time.time,
) -> Report:
    """Raises ConfigError for a metric or a control that there is not."""
    if metric not in METRICS:
        raise ConfigError(f"there is no metric {metric!r}; there are: {', '.join(METRICS)}", "--metric")
    names = _names(figures)
    if control is not None and control not in names:
        raise ConfigError(f"there is no variant {control!r}; there are: {', '.join(names)}", "--control")
    control = control or names[0]
    split = _split(figures)
    comparisons = _comparisons(figures, metric, control, names, alpha)
    return Report(
        route=figures.name.route,
        version=figures.name.version,
        is_in_force=figures.is_in_force,
        other_versions=figures.other_versions,
        made_at=clock(),
        began_at=figures.record.began_at,
        updated_at=figures.record.updated_at,
        alpha=alpha,
        metric=metric,
        control=control,
        num_subjects=figures.num_subjects,
        split=split,
        variants=[_variant(figures, name, name == control, alpha) for name in names],
        comparisons=comparisons,
        comments=figures.feedback.comments,
    )


def _names(figures: ExperimentFigures) -> list[str]:
    """As the policy lists them, then those that only the figures know."""
    listed = [] if figures.route is None else [arm.variant for arm in figures.route.split]
    return list(dict.fromkeys([*listed, *sorted(figures.record.variants)]))


def _split(figures: ExperimentFigures) -> SplitReport:
    split = figures.record.split
    test = split_test(split)
    return SplitReport(
        is_broken=test is not None and test.p_value < MAX_SPLIT_P_VALUE,
        p_value=None if test is None else test.p_value,
        chi_square=None if test is None else test.chi_square,
        counted=split.counted,
        expected=split.expected,
    )


# ------------------------------------------------------------------------------------------ one variant


def _variant(figures: ExperimentFigures, name: str, is_control: bool, alpha: float) -> VariantReport:
    its = figures.record.variants.get(name, VariantFigures())
    feedback = figures.feedback.sums.get(name, ClusterSums())
    histograms = {metric: _whole(its.histogram_groups(metric)) for metric in TIMES}
    return VariantReport(
        variant=name,
        is_control=is_control,
        num_subjects=figures.record.split.counted.get(name, 0),
        assigned=its.assigned,
        served=its.served,
        times={
            metric: _times(its, metric, sum(histogram.values()), alpha)
            for metric, histogram in histograms.items()
            if histogram
        },
        rates={
            metric: _within(mean, alpha, 0.0, 1.0)
            for metric in RATES
            if (mean := clustered_mean(its.cluster_sums(metric))) is not None
        },
        num_feedback=round(sum(feedback.weights)),
        feedback=None if (mean := clustered_mean(feedback)) is None else _within(mean, alpha, -1.0, 1.0),
        histograms={metric: _bins(histogram) for metric, histogram in histograms.items()},
    )


def _whole(groups: Sequence[Histogram]) -> Histogram:
    whole: Histogram = {}
    for group in groups:
        add_counts(whole, group)
    return whole


def _bins(histogram: Histogram) -> list[Bin]:
    return [
        Bin(bin_edge_s(number), bin_edge_s(number + 1), histogram[number]) for number in sorted(histogram)
    ]


def _times(figures: VariantFigures, metric: str, num_values: int, alpha: float) -> TimeReport:
    mean = clustered_mean(figures.cluster_sums(metric))
    quantiles = {}
    for share in QUANTILES:
        found = quantile(figures.histogram_groups(metric), share, alpha)
        if found is not None:
            quantiles[f"p{share * 100:g}"] = Estimate(found.value, found.low, found.high)
    geometric_mean = None
    if mean is not None:
        low, high = mean.interval(alpha)
        geometric_mean = Estimate(math.exp(mean.value), math.exp(low), math.exp(min(high, 100.0)))
    return TimeReport(num_values, geometric_mean, quantiles)


def _within(mean: Mean, alpha: float, lowest: float, highest: float) -> Estimate:
    low, high = mean.interval(alpha)
    return Estimate(mean.value, max(low, lowest), min(high, highest))


# ------------------------------------------------------------------------------------------ comparisons


def _comparisons(
    figures: ExperimentFigures, primary: str, control: str, names: Sequence[str], alpha: float
) -> list[Comparison]:
    """The primary metric's are corrected for their number, and so, apart from them, are all others."""
    others = [name for name in names if name != control]
    comparisons = []
    for metrics in ([primary], [name for name in METRICS if name != primary]):
        family = [
            compare(figures, METRICS[metric], control, other, alpha) for metric in metrics for other in others
        ]
        known = [one for one in family if one.p_value is not None]
        adjusted = dict(zip(map(id, known), holm([one.p_value or 0.0 for one in known]), strict=True))
        comparisons += [
            msgspec.structs.replace(
                one, adjusted_p_value=adjusted[id(one)], is_called=adjusted[id(one)] < alpha
            )
            if id(one) in adjusted
            else one
            for one in family
        ]
    return comparisons


def compare(
    figures: ExperimentFigures, metric: Metric, control: str, variant: str, alpha: float
) -> Comparison:
    """As the verdict has it, but for the correction for several comparisons."""
    nothing = Comparison(metric.name, variant, metric.kind)
    means = [_mean(figures, metric, name) for name in (control, variant)]
    first, second = means
    if first is None or second is None:
        return msgspec.structs.replace(nothing, why_not="there is nothing to compare yet")
    for name, mean in ((control, first), (variant, second)):
        if mean.num_effective_clusters < MIN_EFFECTIVE_CLUSTERS:
            why = (
                f"too few subjects got {name}: as if there were {mean.num_effective_clusters:.0f}, and "
                f"{MIN_EFFECTIVE_CLUSTERS:.0f} are needed"
            )
            return msgspec.structs.replace(nothing, why_not=why)
    found = difference(
        first, second, tau=metric.tau, alpha=alpha, shares_variance=metric.kind == "difference"
    )
    if found is None:
        return msgspec.structs.replace(nothing, why_not="it is the same for everybody")
    return _told(nothing, found, metric, figures.num_subjects)


def _told(nothing: Comparison, found: Difference, metric: Metric, num_subjects: int) -> Comparison:
    as_shown = math.exp if metric.kind == "ratio" else float
    missing = (found.missing_factor - 1) * num_subjects
    return msgspec.structs.replace(
        nothing,
        estimate=Estimate(as_shown(found.value), as_shown(found.low), as_shown(found.high)),
        p_value=found.p_value,
        detectable=as_shown(found.detectable),
        wanted=as_shown(metric.tau),
        num_missing_subjects=math.ceil(missing),
    )


def _mean(figures: ExperimentFigures, metric: Metric, variant: str) -> Mean | None:
    if metric.name == "feedback":
        sums = figures.feedback.sums.get(variant)
    else:
        sums = figures.record.variants.get(variant, VariantFigures()).clusters.get(metric.name)
    return None if sums is None else clustered_mean(sums)
