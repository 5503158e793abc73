"""The share of the requests that took no longer than a time: a line for each rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.knee.observations import Floats, requests_of
from loadtest.knee.result import KneeResult
from loadtest.report.chart import Cell, Chart, legend, log_seconds, new_figure
from loadtest.report.rate_curves import ALIKE, LATENCIES, alike_points, rate_points, slo_tier
from loadtest.report.theme import NUM_RATES, Theme

MAX_POINTS = 400  # of a line: more are not seen


@dataclass(frozen=True, slots=True)
class LatencySample:
    """All requests that one line shows. Infinite: failed; nan: ended before it was known."""

    label: str
    latencies_s: Floats
    failed_share: float


def knee_share_charts(result: KneeResult) -> list[Chart]:
    """Of the unloaded probe, and of each rate; for each arrival law."""
    unloaded = [requests_of(probe.requests) for probe in result.probes if probe.kind == "unloaded"]
    points = rate_points(result.probes)
    cvs: list[float | None] = [*sorted({point.cv for point in points})] or [None]
    charts = []
    for cv in cvs:
        groups = [("one at a time", unloaded)] if unloaded else []
        for alike in alike_points([point for point in points if point.cv == cv]):
            rate = float(np.mean([point.rate for point in alike]))
            groups.append((f"{rate:.3g}/s", [point.requests for point in alike]))
        for name in LATENCIES:
            samples = [
                LatencySample(
                    label,
                    np.concatenate([getattr(one, f"{name}_s") for one in requests]),
                    float(np.concatenate([one.failed for one in requests]).mean()),
                )
                for label, requests in groups
                if sum(len(one) for one in requests)
            ]
            limits = {
                tier.name: tier.limits_s[name] for tier in map(slo_tier, result.slo) if name in tier.limits_s
            }
            suffix, law = ("", "") if len(cvs) == 1 else (f"-cv{cv:g}", f" (arrivals with CV {cv:g})")
            if chart := share_chart(name, samples, limits, suffix, law):
                charts.append(chart)
    return charts


def share_chart(
    name: str, samples: Sequence[LatencySample], limits_s: dict[str, float], suffix: str = "", law: str = ""
) -> Chart | None:
    """None if nothing is known of this latency."""
    shown = [(sample, *_shares(sample.latencies_s)) for sample in samples]
    shown = [(sample, times, shares) for sample, times, shares in shown if len(times)]
    if not shown:
        return None
    rows: list[list[Cell]] = [
        [sample.label, sample.failed_share, float(time_s), float(share)]
        for sample, times, shares in shown
        for time_s, share in zip(times, shares, strict=True)
    ]

    def draw(theme: Theme) -> Any:
        figure, (panel,) = new_figure(theme, 3.9)
        for place, (sample, times, shares) in enumerate(shown):
            failed = f" ({100 * sample.failed_share:.2g} % failed)" if sample.failed_share else ""
            panel.plot(
                times, 100 * shares, drawstyle="steps-post", linewidth=1.5,
                color=theme.rate(place, len(shown)), linestyle=("-", "--", "-.")[place // NUM_RATES % 3],
                label=f"{sample.label}{failed}",
            )  # fmt: skip
        for tier, limit_s in limits_s.items():
            panel.axvline(
                limit_s, color=theme["alarm"], linewidth=1.2, linestyle=(0, (5, 3)), label=f"limit ({tier})"
            )
        panel.set_ylim(0, 101)
        log_seconds(panel, axis="x")
        panel.set_xlabel(LATENCIES[name].lower() + (", from due" if name != "tpot" else ""))
        panel.set_ylabel("requests that took no longer (%)")
        legend(panel, theme)
        return figure

    failed = sum(sample.failed_share > 0 for sample, _, _ in shown)
    note = (
        "no request failed"
        if not failed
        else f"{failed} of the {len(shown)} lines end below 100 %, as some failed"
    )
    return Chart(
        name=f"{name}-shares{suffix}",
        title=f"{LATENCIES[name]}: all requests{law}",
        caption=(
            "The share of the requests that took no longer than a time, which is on a logarithmic axis. "
            "Probes whose "
            f"rates differ by less than {ALIKE:.0%} are one line. Failures are infinite: {note}."
        ),
        draw=draw,
        header=["requests", "failed_share", "seconds", "share_no_longer"],
        rows=rows,
    )


def _shares(latencies_s: Floats) -> tuple[Floats, Floats]:
    """Finite times in order, and the share of all known ones that are not above each."""
    known = np.sort(latencies_s[~np.isnan(latencies_s)])
    finite = known[np.isfinite(known)]
    if not len(finite):
        return np.empty(0), np.empty(0)
    # From zero on: a line that begins at its first step would hang in the air.
    places = np.unique(np.linspace(0, len(finite) - 1, min(len(finite), MAX_POINTS)).astype(int))
    return finite[[0, *places]], np.array([0, *(places + 1)]) / len(known)
