"""A report for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from compose.experiment.metric import METRICS
from compose.experiment.report import Comparison, Estimate, Report, VariantReport
from compose.experiment.verdict import verdict
from compose.fitted_table import FittedTable

OUTCOMES = ("ok", "refused", "failed", "aborted")
SHOWN_TIMES = {"ttft": "first token", "tpot": "per output token", "e2e": "whole answer"}


def report_text(report: Report) -> RenderableType:
    return Group(
        Text(headline(report), style="bold"),
        "",
        *(Text(sentence) for sentence in verdict(report)),
        "",
        FittedTable(_requests(report)),
        "",
        FittedTable(_times(report)),
        "",
        FittedTable(_comparisons(report)),
        "",
        *(Text(note, style="dim") for note in notes(report)),
    )


def headline(report: Report) -> str:
    return (
        f"Experiment {report.route}, version {report.version}: {report.num_subjects:,} subjects from "
        f"{moment(report.began_at)} to {moment(report.updated_at)}"
    )


def moment(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time).isoformat(sep=" ", timespec="minutes")


def notes(report: Report) -> list[str]:
    """What a reader has to know of the figures."""
    p_value = report.split.p_value
    if p_value is None:
        split = "The split cannot be checked: no subject came while two variants had a weight."
    else:
        split = (
            f"Split: p {p_value_cell(p_value)}, of {sum(report.split.counted.values()):,} subjects. Each was "
            "counted when it first came, against the weights of that moment."
        )
    return [
        _version_note(report),
        split,
        "Requests count for the variant that they were assigned, whoever answered. A subject counts in means "
        "as often as it asked, but no more than ten times. Overridden and shadow requests do not count.",
        f"Comparisons with {report.control} hold however often one looks (normal mixture, variance by "
        "clusters of subjects; Holm for several variants, and for all metrics but the primary one). The "
        f"intervals of single figures are those of one look, {100 * (1 - report.alpha):g} %.",
    ]


def _version_note(report: Report) -> str:
    state = "in force" if report.is_in_force else "not in force"
    others = ", ".join(map(str, report.other_versions))
    told = f"there are figures of {others}, too (--version)" if others else "there are figures of no other"
    return f"Version {report.version} is {state}; {told}."


def _requests(report: Report) -> Table:
    table = Table(
        Column("variant", no_wrap=True), "subjects", "requests", *OUTCOMES, "answered", "input tokens",
        "output tokens", "finish reasons", "feedback",
        box=None,
    )  # fmt: skip
    for one in report.variants:
        outcomes = one.assigned.outcomes
        table.add_row(
            variant_name(one),
            f"{one.num_subjects:,}",
            f"{one.assigned.requests:,}",
            *(f"{outcomes.get(outcome, 0):,}" for outcome in OUTCOMES),
            f"{one.served.requests:,}",
            f"{one.assigned.input_tokens:,}",
            f"{one.assigned.output_tokens:,}",
            finish_reasons(one),
            feedback_cell(one),
        )
    return table


def _times(report: Report) -> Table:
    table = Table(
        Column("variant", no_wrap=True), "time", "values", "geometric mean", "p50", "p95", "p99", box=None
    )
    for one in report.variants:
        for metric, title in SHOWN_TIMES.items():
            if metric in one.times:
                table.add_row(
                    variant_name(one), title, f"{one.times[metric].num_values:,}", *time_cells(one, metric)
                )
    return table


def _comparisons(report: Report) -> Table:
    table = Table(
        Column(f"against {report.control}", no_wrap=True),
        "metric",
        "difference",
        "interval",
        "p",
        "would show by now",
        box=None,
    )
    for one in report.comparisons:
        table.add_row(*comparison_cells(one))
    return table


# ------------------------------------------------------------------------------------------ cells


def variant_name(one: VariantReport) -> str:
    return f"{one.variant} (control)" if one.is_control else one.variant


def finish_reasons(one: VariantReport) -> str:
    return (
        ", ".join(f"{reason} {count:,}" for reason, count in sorted(one.assigned.finish_reasons.items()))
        or "–"
    )


def feedback_cell(one: VariantReport) -> str:
    scores = f"{one.num_feedback:,} scores" if one.num_feedback else "–"
    if one.feedback is None or one.feedback.high is None:
        return scores
    return f"{one.feedback.value:+.2f} ({one.feedback.low:+.2f} to {one.feedback.high:+.2f}), {scores}"


def time_cells(one: VariantReport, metric: str) -> Iterable[str]:
    times = one.times[metric]
    yield "–" if times.geometric_mean is None else time_cell(times.geometric_mean)
    for name in ("p50", "p95", "p99"):
        yield time_cell(times.quantiles[name]) if name in times.quantiles else "–"


def time_cell(estimate: Estimate) -> str:
    high = "?" if estimate.high is None else seconds(estimate.high)
    return f"{seconds(estimate.value)} ({seconds(estimate.low)} to {high})"


def seconds(time_s: float) -> str:
    return (
        f"{time_s * 1e3:.3g} ms"
        if time_s < 0.9995
        else f"{time_s:.3g} s"
        if time_s < 999.5
        else f"{time_s:.0f} s"
    )


def p_value_cell(p_value: float | None) -> str:
    if p_value is None:
        return "–"
    return "< 0.0001" if p_value < 0.0001 else f"{p_value:.3f}" if p_value > 0.01 else f"{p_value:.4f}"


def comparison_cells(one: Comparison) -> tuple[str, str, str, str, str, str]:
    metric = METRICS[one.metric]
    if one.estimate is None:
        return (one.variant, metric.title, "–", one.why_not or "", "", "")
    high = "?" if one.estimate.high is None else metric.shown(one.estimate.high)
    return (
        one.variant,
        metric.title,
        metric.shown(one.estimate.value) + (" *" if one.is_called else ""),
        f"{metric.shown(one.estimate.low)} to {high}",
        p_value_cell(one.adjusted_p_value),
        "–" if one.detectable is None else metric.amount(one.detectable),
    )
