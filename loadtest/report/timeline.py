"""What went on over the time of a search: at the client, and at the server, on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.knee.observations import Floats
from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.report.chart import Cell, Chart, legend, new_figure
from loadtest.report.theme import Theme

STEP_S = 1.0
MAX_STEPS = 1500  # longer searches are shown in longer steps
KIND_NAMES = {
    "unloaded": "one at a time",
    "saturation": "saturation",
    "closed_loop": "closed loop",
    "open_loop": "open loop",
    "validation": "validation",
}


def timeline_chart(probes: Sequence[Probe]) -> Chart | None:
    """None if there is nothing to show."""
    shown = [probe for probe in probes if probe.requests]
    if not shown:
        return None
    begin_s = min(probe.begin_s for probe in shown)
    end_s = max(probe.begin_s + probe.drained_s for probe in shown)
    step_s = STEP_S * max(1, round((end_s - begin_s) / STEP_S / MAX_STEPS))
    edges = np.arange(begin_s, end_s + step_s, step_s)
    in_flight, tokens, failed = _client_side(shown, edges)
    server = _server_side(shown)
    num_requests = sum(len(probe.requests) for probe in shown)
    num_failed = sum(one.failed for probe in shown for one in probe.requests)
    rows: list[list[Cell]] = [
        ["client", float(at), float(now), float(rate), int(num), None, None, None, None]
        for at, now, rate, num in zip(edges[:-1], in_flight, tokens, failed, strict=True)
    ]
    rows += [
        ["server", at, None, rate, None, running, waiting, usage, preempted]
        for at, running, waiting, usage, rate, preempted in server
    ]

    def draw(theme: Theme) -> Any:
        has_usage = any(row[3] is not None for row in server)
        num_panels = 3 if has_usage else 2
        figure, panels = new_figure(
            theme,
            1.9 * num_panels + 0.6,
            nrows=num_panels,
            sharex=True,
            height_ratios=(1.4, 1, 1)[:num_panels],
        )
        middle = edges[:-1]
        panels[0].plot(middle, in_flight, color=theme.series(0), linewidth=1.3, label="in flight\n(client)")
        _server_line(panels[0], server, 1, theme.series(2), "running\n(server)", "--")
        _server_line(panels[0], server, 2, theme.series(1), "waiting\n(server)", ":")
        panels[0].set_ylabel("requests")
        where = np.flatnonzero(failed)
        if len(where):
            panels[0].plot(
                middle[where], np.zeros(len(where)), marker="x", markersize=5, linestyle="",
                color=theme["alarm"], label="failures", clip_on=False,
            )  # fmt: skip
        panels[1].plot(middle, tokens, color=theme.series(0), linewidth=1.3, label="output\n(client)")
        _server_line(panels[1], server, 4, theme.series(2), "output\n(server)", "--")
        panels[1].set_ylabel("tokens/s")
        if has_usage:
            _server_line(panels[2], server, 3, theme.series(3), "KV cache in\nuse (server)", "-", scale=100)
            panels[2].set_ylabel("KV cache (%)")
            panels[2].set_ylim(0, 102)
        for number, panel in enumerate(panels):
            _probe_bounds(panel, shown, theme, named=number == 0)
            if number < 2:
                panel.set_ylim(bottom=0)
            legend(panel, theme)
        panels[-1].set_xlabel("time since the begin (s)")
        panels[-1].set_xlim(begin_s, end_s)
        return figure

    return Chart(
        name="timeline",
        title="The whole time",
        caption=(
            f"Requests in flight and output tokens as the client saw them, in steps of {step_s:g} s, "
            "and what the server "
            "reported at the same time. The tokens of an answer are spread evenly between its first and "
            "its last. "
            f"Grey stretches are probes. Of all {num_requests:,} requests {num_failed:,} failed "
            f"({_percent(num_failed, num_requests)})."
        ),
        draw=draw,
        header=[
            "side", "seconds", "in_flight", "tokens_per_s", "failures", "running", "waiting", "kv_usage",
            "preemptions",
        ],
        rows=rows,
    )  # fmt: skip


def _client_side(probes: Sequence[Probe], edges: Floats) -> tuple[Floats, Floats, Floats]:
    """In each step: the mean number of requests in flight, output tokens/s, failures that ended in it."""
    step_s = edges[1] - edges[0]
    in_flight, tokens, failed = (np.zeros(len(edges) - 1) for _ in range(3))
    for probe in probes:
        finished = [one.tpot for one in probe.requests if one.tpot is not None and math.isfinite(one.tpot)]
        pace = float(np.median(finished)) if finished else None
        for one in probe.requests:
            if one.sent_s is None:
                continue
            end = probe.begin_s + _end_of(one, probe)
            _spread(
                in_flight, edges, probe.begin_s + one.sent_s, end, (end - probe.begin_s - one.sent_s) / step_s
            )
            if one.first_token_s is not None and (num_tokens := _tokens_of(one, pace)):
                _spread(tokens, edges, probe.begin_s + one.first_token_s, end, num_tokens / step_s)
            if one.failed:
                failed[min(len(failed) - 1, max(0, int((end - edges[0]) / step_s)))] += 1
    return in_flight, tokens, failed


def _tokens_of(one: ProbedRequest, seconds_per_token: float | None) -> float:
    """How many came. Of an answer that was cut off nobody has counted them: at the pace of the others."""
    if one.failed or not one.num_output_tokens:
        return 0.0
    if not one.cut_off:
        return one.num_output_tokens
    if one.end_s is None or one.first_token_s is None or not seconds_per_token:
        return 0.0
    return min(one.num_output_tokens, 1 + (one.end_s - one.first_token_s) / seconds_per_token)


def _end_of(one: ProbedRequest, probe: Probe) -> float:
    return probe.drained_s if one.end_s is None else one.end_s


def _spread(steps: Floats, edges: Floats, begin: float, end: float, amount: float) -> None:
    """Adds an amount evenly over [begin, end)."""
    first, last = (
        int(np.clip((at - edges[0]) // (edges[1] - edges[0]), 0, len(steps) - 1)) for at in (begin, end)
    )
    if first == last or end <= begin:
        steps[first] += amount
        return
    overlap = np.minimum(edges[first + 1 : last + 2], end) - np.maximum(edges[first : last + 1], begin)
    steps[first : last + 1] += amount * np.maximum(overlap, 0) / (end - begin)


ServerRow = tuple[float, float | None, float | None, float | None, float | None, float | None]


def _server_side(probes: Sequence[Probe]) -> list[ServerRow]:
    """Time, running, waiting, KV use, tokens per second since the sample before, preemptions since then."""
    rows: list[ServerRow] = []
    for probe in probes:
        before = None
        for sample in probe.samples:
            rate = preempted = None
            if before is not None and sample.at_s > before.at_s:
                if sample.generation_tokens is not None and before.generation_tokens is not None:
                    rate = (sample.generation_tokens - before.generation_tokens) / (sample.at_s - before.at_s)
                if sample.preemptions is not None and before.preemptions is not None:
                    preempted = sample.preemptions - before.preemptions
            rows.append(
                (
                    probe.begin_s + sample.at_s,
                    sample.running,
                    sample.waiting,
                    sample.kv_usage,
                    rate,
                    preempted,
                )
            )
            before = sample
    return rows


def _server_line(
    panel: Any, rows: Sequence[ServerRow], place: int, colour: str, label: str, line: str, scale: float = 1.0
) -> None:
    values = [np.nan if value is None else scale * value for row in rows for value in [row[place]]]
    if not np.isnan(values).all():
        panel.plot([row[0] for row in rows], values, color=colour, linewidth=1.2, linestyle=line, label=label)


def _probe_bounds(panel: Any, probes: Sequence[Probe], theme: Theme, *, named: bool) -> None:
    end_of_last = -math.inf
    whole_s = probes[-1].begin_s + probes[-1].drained_s - probes[0].begin_s
    for probe in probes:
        panel.axvspan(
            probe.begin_s, probe.begin_s + probe.end_s, color=theme["band"], alpha=0.13, linewidth=0
        )
        if not named:
            continue
        name = KIND_NAMES[probe.kind] if probe.rate is None else f"{probe.rate:.3g}/s"
        x = probe.begin_s + probe.end_s / 2
        room = 0.011 * whole_s * len(name)  # of a letter, about
        if x - room / 2 > end_of_last:
            panel.text(
                x,
                1.02,
                name,
                transform=panel.get_xaxis_transform(),
                ha="center",
                fontsize=8,
                color=theme["faint"],
            )
            end_of_last = x + room / 2


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %" if whole else "–"
