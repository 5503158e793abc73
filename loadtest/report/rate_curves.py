"""Latency and attainment against the offered rate, with the knee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.knee.observations import Requests, good_share, percentile_with_failures, requests_of
from loadtest.knee.probe import Probe
from loadtest.knee.result import KneeResult, SloRow, TierResult
from loadtest.knee.slo import SloTier
from loadtest.report.chart import Cell, Chart, duration, legend, log_seconds, new_figure
from loadtest.report.interval import Estimate, block_numbers, mean_estimate, percentile_estimates
from loadtest.report.theme import Theme

PERCENTS = (50.0, 95.0, 99.0)
LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2el": "Time to the last token"}
MARKERS = ("o", "s", "^")
LINES = ("-", "--", ":")
LIMIT_LINES = ((0, (5, 3)), (0, (1, 2)))
ALIKE = 0.03  # rates so near to each other are one point of a line, and one line of shares


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One open-loop probe: the requests of its measured window."""

    rate: float
    cv: float
    kind: str
    ended_early: bool
    requests: Requests
    block: Any  # [num_requests], see `block_numbers`

    @property
    def failed_share(self) -> float:
        return float(self.requests.failed.mean()) if len(self.requests) else 0.0

    @property
    def unfinished_share(self) -> float:
        return float(self.requests.cut_off.mean()) if len(self.requests) else 0.0


def rate_points(probes: Sequence[Probe]) -> list[RatePoint]:
    """By rate; those that wait for no answer before they send the next, as the others' rates mean little."""
    points = []
    for probe in probes:
        if probe.rate is None or probe.cv is None or not (measured := probe.measured):
            continue
        requests = requests_of(measured)
        block = block_numbers(requests.due_s, probe.warm_cut_s, probe.end_s)
        points.append(RatePoint(probe.rate, probe.cv, probe.kind, probe.ended_early, requests, block))
    return sorted(points, key=lambda point: point.rate)


def alike_points(points: Sequence[RatePoint]) -> list[list[RatePoint]]:
    """Neighbours by rate; the search asks again and again near its estimate."""
    groups: list[list[RatePoint]] = []
    for point in points:
        if groups and point.rate <= groups[-1][0].rate * (1 + ALIKE):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def slo_tier(row: SloRow) -> SloTier:
    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1000

    return SloTier(row.name, seconds(row.ttft_ms), seconds(row.tpot_ms), seconds(row.e2el_ms), row.attainment)


def rate_charts(result: KneeResult) -> list[Chart]:
    """For each arrival law: a curve of each latency that a tier limits, TTFT and TPOT always; attainment."""
    points = rate_points(result.probes)
    cvs = sorted({point.cv for point in points})
    limited = {name for row in result.slo for name in slo_tier(row).limits_s}
    charts: list[Chart] = []
    for cv in cvs:
        of_cv = [point for point in points if point.cv == cv]
        tiers = [tier for tier in result.tiers if tier.arrival_cv == cv]
        shape = result.shape_knee.rate if result.shape_knee is not None and cv == result.arrival_cv else None
        suffix = f"-cv{cv:g}" if len(cvs) > 1 else ""
        law = f" (arrivals with CV {cv:g})" if len(cvs) > 1 else ""
        shown = ("ttft", "tpot", "e2el") if "e2el" in limited else ("ttft", "tpot")
        charts += [_latency_chart(name, of_cv, tiers, shape, suffix, law) for name in shown]
        if tiers:
            charts.append(_attainment_chart(of_cv, tiers, suffix, law))
    return charts


def _latency_chart(
    name: str,
    points: Sequence[RatePoint],
    tiers: Sequence[TierResult],
    shape_knee: float | None,
    suffix: str,
    law: str,
) -> Chart:
    found = [
        percentile_estimates(getattr(point.requests, f"{name}_s"), point.block, PERCENTS) for point in points
    ]
    # The line goes through what is alike, taken together: it would jump between points at nearly one rate.
    groups = alike_points(points)
    mean_rates = [float(np.mean([point.rate for point in group])) for group in groups]
    together = [
        [
            percentile_with_failures(
                np.concatenate([getattr(point.requests, f"{name}_s") for point in group]), percent
            )
            for percent in PERCENTS
        ]
        for group in groups
    ]
    rows: list[list[Cell]] = [
        [
            point.rate,
            point.kind,
            len(point.requests),
            point.failed_share,
            point.unfinished_share,
            *(end for one in estimates for end in (one.value, one.low, one.high)),
        ]
        for point, estimates in zip(points, found, strict=True)
    ]

    def draw(theme: Theme) -> Any:
        figure, (strip, panel) = new_figure(theme, 4.6, nrows=2, height_ratios=(1, 6), sharex=True)
        failure_strip(
            strip, [point.rate for point in points], [100 * point.failed_share for point in points], theme
        )
        finite = [
            value
            for estimates in found
            for estimate in estimates
            for value in (estimate.low, estimate.value, estimate.high)
            if math.isfinite(value) and value > 0
        ]
        limits = [limit for tier in tiers if (limit := slo_tier(tier.slo).limits_s.get(name)) is not None]
        low, high = min([*finite, *limits], default=0.01) / 1.5, max([*finite, *limits], default=1.0) * 1.6
        for place, percent in enumerate(PERCENTS):
            line = [one[place] if math.isfinite(one[place]) else np.nan for one in together]
            panel.plot(mean_rates, line, color=theme.series(place), linestyle=LINES[place], linewidth=1.4)
            _percentile_points(
                panel, points, [one[place] for one in found], place, f"p{percent:g}", high, theme
            )
        panel.set_ylim(low, high)
        log_seconds(panel)
        _slo_lines(panel, name, tiers, theme)
        _knees(panel, tiers, shape_knee, theme)
        panel.set_ylabel(
            f"{LATENCIES[name].lower()}, from due" if name != "tpot" else LATENCIES[name].lower()
        )
        panel.set_xlabel("offered rate (requests/s)")
        legend(panel, theme)
        return figure

    has_early_end = any(point.ended_early for point in points)
    start = (
        "from when a request was due" if name != "tpot" else "the mean of a request behind its first token"
    )
    return Chart(
        name=f"{name}-rate{suffix}",
        title=f"{LATENCIES[name]} and rate{law}",
        caption=(
            f"{LATENCIES[name]}, {start}, on a logarithmic axis. A point is one probe; its bar is the 90 % "
            "interval of a bootstrap over tenths of its time. Lines join "
            f"probes whose rates differ by less than {ALIKE:.0%}, taken together. Failures count as "
            "infinite: a percentile that they "
            "reach is an open triangle at the upper edge. "
            + ("Grey points were ended early, and are at least so slow. " if has_early_end else "")
            + "The strip above is the share of failed requests."
        ),
        draw=draw,
        header=["rate", "probe", "requests", "failed_share", "unfinished_share"]
        + [f"p{percent:g}_{end}" for percent in PERCENTS for end in ("s", "low_s", "high_s")],
        rows=rows,
    )


def _percentile_points(
    panel: Any,
    points: Sequence[RatePoint],
    estimates: Sequence[Estimate],
    place: int,
    label: str,
    top: float,
    theme: Theme,
) -> None:
    colour = theme.series(place)
    finite = [number for number, one in enumerate(estimates) if math.isfinite(one.value)]
    rates = [points[number].rate for number in finite]
    values = [estimates[number].value for number in finite]
    below = [estimates[number].value - estimates[number].low for number in finite]
    above = [min(estimates[number].high, top * 10) - estimates[number].value for number in finite]
    panel.errorbar(
        rates, values, yerr=(below, above), color=colour, linestyle="",
        marker=MARKERS[place], markersize=5, elinewidth=1.1, capsize=2.5, label=label,
    )  # fmt: skip
    early = [number for number in finite if points[number].ended_early]
    panel.plot(
        [points[number].rate for number in early], [estimates[number].value for number in early],
        marker=MARKERS[place], markersize=5, color=theme["faint"], linestyle="",
    )  # fmt: skip
    infinite = [points[number].rate for number, one in enumerate(estimates) if one.value == math.inf]
    panel.plot(
        infinite, [top * 0.93] * len(infinite), marker="^", markersize=8, markerfacecolor="none",
        markeredgecolor=colour, markeredgewidth=1.5, linestyle="", clip_on=False,
        label=f"{label} is ∞ (failures)" if infinite else None,
    )  # fmt: skip


def _attainment_chart(
    points: Sequence[RatePoint], tiers: Sequence[TierResult], suffix: str, law: str
) -> Chart:
    found = {
        tier.name: [
            mean_estimate(good_share(point.requests, slo_tier(tier.slo)), point.block) for point in points
        ]
        for tier in tiers
    }
    rows: list[list[Cell]] = [
        [tier.name, "probe", point.rate, estimate.value, estimate.low, estimate.high, point.failed_share]
        for tier in tiers
        for point, estimate in zip(points, found[tier.name], strict=True)
    ]
    rows += [
        [tier.name, "fit", one.rate, one.attainment, one.low, one.high, None]
        for tier in tiers
        for one in tier.curve
    ]

    def draw(theme: Theme) -> Any:
        figure, (strip, panel) = new_figure(theme, 4.2, nrows=2, height_ratios=(1, 6), sharex=True)
        failure_strip(
            strip, [point.rate for point in points], [100 * point.failed_share for point in points], theme
        )
        for number, tier in enumerate(tiers):
            colour = theme.series(number)
            estimates = found[tier.name]
            values = np.array([one.value for one in estimates])
            panel.errorbar(
                [point.rate for point in points],
                100 * values,
                yerr=(
                    100 * (values - [one.low for one in estimates]),
                    100 * (np.array([one.high for one in estimates]) - values),
                ),
                color=colour, linestyle="", marker=MARKERS[number % 3], markersize=5, capsize=2.5,
                label=f"{tier.name}: probes",
            )  # fmt: skip
            if tier.curve:
                rates = [one.rate for one in tier.curve]
                panel.plot(
                    rates, [100 * one.attainment for one in tier.curve], color=colour, linewidth=1.6,
                    linestyle=LINES[number % 3], label=f"{tier.name}: fit",
                )  # fmt: skip
                panel.fill_between(
                    rates, [100 * one.low for one in tier.curve], [100 * one.high for one in tier.curve],
                    color=colour, alpha=0.15, linewidth=0,
                )  # fmt: skip
        for number, goal in enumerate(sorted({tier.slo.attainment for tier in tiers})):
            panel.axhline(
                100 * goal, color=theme["alarm"], linewidth=1.2, linestyle=LIMIT_LINES[number % 2],
                label=f"asked for: {100 * goal:.4g} %",
            )  # fmt: skip
        _knees(panel, tiers, None, theme)
        panel.set_ylim(-3, 103)
        panel.set_ylabel("requests within the SLO (%)")
        panel.set_xlabel("offered rate (requests/s)")
        legend(panel, theme)
        return figure

    return Chart(
        name=f"attainment-rate{suffix}",
        title=f"Attainment and rate{law}",
        caption=(
            "The share of all requests, failed ones included, that kept every limit of a tier. Bars are "
            "90 % intervals "
            "of a bootstrap over tenths of a probe's time; bands are those of the fit, from which the "
            "capacity is read."
        ),
        draw=draw,
        header=["tier", "from", "rate", "attainment", "low", "high", "failed_share"],
        rows=rows,
    )


def failure_strip(strip: Any, loads: Sequence[float], percents: Sequence[float], theme: Theme) -> None:
    """The narrow panel above a chart, with the share of failed requests at each load."""
    strip.vlines(loads, 0, percents, color=theme["alarm"], linewidth=2.5)
    strip.plot(loads, percents, marker="o", markersize=3.5, linestyle="", color=theme["alarm"])
    strip.set_ylim(0, max([1.0, *(1.25 * percent for percent in percents)]))
    strip.set_ylabel("failed\n(%)", rotation=0, ha="right", va="center")
    strip.yaxis.label.set_size(9)
    strip.tick_params(labelbottom=False)
    strip.locator_params(axis="y", nbins=2)
    if not any(percents):
        strip.text(
            0.5,
            0.45,
            "no request failed",
            transform=strip.transAxes,
            ha="center",
            fontsize=9,
            color=theme["faint"],
        )


def _slo_lines(panel: Any, name: str, tiers: Sequence[TierResult], theme: Theme) -> None:
    shown: dict[float, list[str]] = {}
    for tier in tiers:
        limit_s = slo_tier(tier.slo).limits_s.get(name)
        if limit_s is not None:
            shown.setdefault(limit_s, []).append(tier.name)
    for number, (limit_s, names) in enumerate(shown.items()):
        panel.axhline(
            limit_s, color=theme["alarm"], linewidth=1.2, linestyle=LIMIT_LINES[number % 2],
            label=f"limit: {duration(limit_s)}\n({', '.join(names)})",
        )  # fmt: skip


def _knees(panel: Any, tiers: Sequence[TierResult], shape_knee: float | None, theme: Theme) -> None:
    """The capacity of each tier, and its interval as a band."""
    for number, tier in enumerate(tiers):
        if tier.slo_capacity is None:
            continue
        low, high = tier.slo_capacity.ci90
        rate = tier.slo_capacity.rate
        name = tier.name if len(tiers) > 1 else "capacity"
        panel.axvline(
            rate, color=theme["ink"], linewidth=1.3, linestyle=LINES[number % 3],
            label=f"{name}: {rate:.3g}/s\n[{low:.3g}, {high:.3g}]",
        )  # fmt: skip
        panel.axvspan(low, high, color=theme["band"], alpha=0.2, linewidth=0)
    if shape_knee is not None:
        panel.axvline(
            shape_knee,
            color=theme["faint"],
            linewidth=1.3,
            linestyle="-.",
            label=f"shape knee: {shape_knee:.3g}/s",
        )
