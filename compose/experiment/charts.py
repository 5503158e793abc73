"""Pictures of a report, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from compose.experiment.metric import METRICS
from compose.experiment.report import Bin, Comparison, Report
from compose.experiment.text import seconds

WIDTH, LABELS, RIGHT = 760, 230, 44
MAX_NAME_CHARACTERS = 16  # more would run into the picture
ROW, AXIS, SHARES = 30, 34, 44
TIME_HEIGHT = 220
COLOURS = ("#2b6cb0", "#d9822b", "#2f9e6e", "#a13d8d", "#7a7f87")  # by order of the variants


def comparison_chart(comparisons: Sequence[Comparison]) -> str:
    """A row with an interval for each, all of one kind and over one axis."""
    none = 1.0 if comparisons[0].kind == "ratio" else 0.0
    ends = [none]
    for one in comparisons:
        assert one.estimate is not None, "only what has been estimated is drawn"
        ends += [one.estimate.low, one.estimate.value if one.estimate.high is None else one.estimate.high]
    low, high = min(ends), max(ends)
    margin = 0.06 * (high - low) or 0.01
    low, high = low - margin, high + margin
    height = ROW * len(comparisons) + AXIS

    def x(value: float) -> float:
        return LABELS + (WIDTH - LABELS - RIGHT) * (value - low) / (high - low)

    parts = [_line(x(none), 0, x(none), height - AXIS, "none")]
    for row, one in enumerate(comparisons):
        assert one.estimate is not None, "see above"
        y = ROW * (row + 0.5)
        colour = COLOURS[0] if one.is_called else COLOURS[-1]
        end = one.estimate.value if one.estimate.high is None else one.estimate.high
        label = escape(f"{_short(one.variant)}: {METRICS[one.metric].title}")
        parts += [
            f'<text x="0" y="{y + 4:.1f}">{label}</text>',
            f'<line x1="{x(one.estimate.low):.1f}" x2="{x(end):.1f}" y1="{y}" y2="{y}" stroke="{colour}" '
            'stroke-width="3"/>',
            f'<circle cx="{x(one.estimate.value):.1f}" cy="{y}" r="5" fill="{colour}"/>',
        ]
    metric = METRICS[comparisons[0].metric]
    parts += [
        part
        for value in _even_ticks(low - none, high - none)
        for part in _tick(x(value + none), height - AXIS, metric.shown(value + none) if value else "0")
    ]
    parts.append(_line(LABELS, height - AXIS, WIDTH - RIGHT, height - AXIS, "axis"))
    return _svg(height, parts)


def time_chart(report: Report, metric: str) -> str:
    """The share of the requests that took no longer, a line for each variant; times are logarithmic."""
    shown = [(number, one) for number, one in enumerate(report.variants) if one.histograms.get(metric)]
    low = min(one.histograms[metric][0].begin_s for _, one in shown)
    high = max(one.histograms[metric][-1].end_s for _, one in shown)
    top, bottom = 26, TIME_HEIGHT - AXIS

    def x(time_s: float) -> float:
        return SHARES + (WIDTH - SHARES - RIGHT) * math.log(time_s / low) / math.log(high / low)

    def y(share: float) -> float:
        return bottom - (bottom - top) * share

    parts = [part for time_s in _time_ticks(low, high) for part in _tick(x(time_s), bottom, seconds(time_s))]
    for share in (0.0, 0.5, 0.95):
        parts += [
            _line(SHARES, y(share), WIDTH - RIGHT, y(share), "none" if share else "axis"),
            f'<text x="0" y="{y(share) + 4:.1f}">{share * 100:g} %</text>',
        ]
    for place, (number, one) in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{x(time_s):.1f},{y(share):.1f}" for time_s, share in _shares(one.histograms[metric])
        )
        name = escape(_short(one.variant))
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{SHARES + 150 * place}" y="14" style="fill:{colour}">{name}</text>',
        ]
    return _svg(TIME_HEIGHT, parts)


def _shares(bins: Sequence[Bin]) -> list[tuple[float, float]]:
    """Times, and the shares that are not above them."""
    total = sum(one.count for one in bins)
    shares: list[tuple[float, float]] = []
    count = 0
    for one in bins:
        shares.append((one.begin_s, count / total))
        count += one.count
        shares.append((one.end_s, count / total))
    return shares


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[: MAX_NAME_CHARACTERS - 1]}…"


def _even_ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 7)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _time_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten; only the powers, where these would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    within = [time_s for time_s in ticks if low <= time_s <= high]
    if len(within) > 10:
        return [time_s for time_s in within if math.isclose(math.log10(time_s) % 1, 0, abs_tol=1e-9)]
    return within or [low, high]


def _tick(x: float, y: float, label: str) -> list[str]:
    return [
        _line(x, y, x, y + 5, "axis"),
        f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{escape(label)}</text>',
    ]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
