"""A report in plain words."""

from __future__ import annotations

from compose.experiment.metric import METRICS
from compose.experiment.report import MAX_SPLIT_P_VALUE, Comparison, Report, SplitReport


def verdict(report: Report) -> list[str]:
    """Sentences: of the split, if it is broken; else of the primary metric, then of others that differ."""
    if report.split.is_broken:
        return [_broken_split(report.split)]
    if len(report.variants) < 2:
        return ["There is only one variant: nothing to compare."]
    primary = [one for one in report.comparisons if one.metric == report.metric]
    besides = [one for one in report.comparisons if one.metric != report.metric and one.is_called]
    return [
        *(_sentence(one, report) for one in primary),
        *(f"Besides, {_sentence(one, report)}" for one in besides),
    ]


def _broken_split(split: SplitReport) -> str:
    total = sum(split.counted.values())
    shares = ", ".join(
        f"{name} got {split.counted.get(name, 0) / total:.1%} instead of {expected / total:.1%}"
        for name, expected in split.expected.items()
    )
    return (
        f"The split is broken: do not read on. Of the subjects {shares}; the chance of that is below "
        f"{MAX_SPLIT_P_VALUE:g}. Requests of some variant are lost, or are counted for another one, and what "
        "remains cannot be compared."
    )


def _sentence(one: Comparison, report: Report) -> str:
    metric, control = METRICS[one.metric], report.control
    if one.estimate is None or one.estimate.high is None or one.detectable is None or one.wanted is None:
        return f"Cannot tell yet how {one.variant} and {control} differ in {metric.title}: {one.why_not}."
    low, high = metric.shown(one.estimate.low), metric.shown(one.estimate.high)
    interval = f"{100 * (1 - report.alpha):g} % interval {low} to {high}"
    if one.is_called:
        return f"{metric.statement(one.variant, control, one.estimate.value)} ({interval})."
    sentence = (
        f"no difference of {one.variant} and {control} shows in {metric.title} ({interval}); "
        f"one of {metric.amount(one.detectable)} would show by now."
    )
    if not one.num_missing_subjects:
        return f"N{sentence[1:]}"
    return (
        f"Cannot tell yet: {sentence} For one of {metric.amount(one.wanted)}, about "
        f"{_rounded_up(one.num_missing_subjects):,} more subjects are needed."
    )


def _rounded_up(count: int) -> int:
    """To two digits: more would be a pretence."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return -(-count // unit) * unit
