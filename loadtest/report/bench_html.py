"""Runs of `bench serve` as one page of HTML, or as charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.knee.observations import requests_of
from loadtest.report.bench_result import PERCENTS, BenchRun
from loadtest.report.chart import Cell, Chart, duration, legend, log_seconds, new_figure
from loadtest.report.html import flat_facts
from loadtest.report.interval import Estimate, block_numbers, percentile_estimates
from loadtest.report.latency_shares import LatencySample, share_chart
from loadtest.report.lengths import length_chart
from loadtest.report.page import (
    code,
    facts,
    figure,
    heading,
    note,
    number,
    table,
    text,
    verdict_box,
    whole_page,
    write_page,
)
from loadtest.report.rate_curves import LATENCIES, LINES, MARKERS, failure_strip
from loadtest.report.theme import Theme
from loadtest.report.timeline import timeline_chart
from loadtest.report.words import share_text
from loadtest.report.worst_requests import check_trace_url, failure_table, worst_requests, worst_table

GAP_S = 5.0  # between runs on the axis of time, which were made at some time or other


def write_bench_html(
    runs: Sequence[BenchRun], path: Path, *, trace_url: str | None = None, flag: str = "--html"
) -> None:
    """Raises ConfigError for a file that cannot be written, or a link without `{trace_id}`."""
    check_trace_url(trace_url)
    write_page(bench_page(runs, trace_url), path, flag)


def bench_charts(runs: Sequence[BenchRun]) -> list[Chart]:
    """All that the files give; in the order of the page."""
    charts: list[Chart | None] = []
    if len({_load(run) for run in runs}) > 1:
        charts += [_load_chart(name, runs) for name in LATENCIES]
        charts.append(_throughput_chart(runs))
    detailed = [(run, requests_of(run.probe.measured)) for run in runs if run.probe is not None]
    for name in LATENCIES:
        samples = [
            LatencySample(run.label, getattr(requests, f"{name}_s"), run.failed_share)
            for run, requests in detailed
        ]
        charts.append(share_chart(name, samples, {}))
    charts += [_timeline(runs), _lengths(runs)]
    return [chart for chart in charts if chart is not None]


def bench_page(runs: Sequence[BenchRun], trace_url: str | None = None) -> str:
    models = ", ".join(dict.fromkeys(str(run.values.get("model_id")) for run in runs))
    return whole_page(f"Load test of {models}", _sections(runs, trace_url))


def _sections(runs: Sequence[BenchRun], trace_url: str | None) -> Iterator[str]:
    runs = sorted(runs, key=_load)
    yield verdict_box([run_sentence(run) for run in runs], broken=False)
    yield _run_table(runs)
    if not all(run.counts_from_due for run in runs):
        yield note(
            "Not every file holds the times of each request (--save-detailed): where it does not, "
            "percentiles are those "
            "of the answered requests alone, from when they were sent."
        )
    for chart in bench_charts(runs):
        yield from figure(chart)
    probes = [run.probe for run in runs if run.probe is not None]
    if worst := worst_requests(probes, []):
        yield heading("The worst requests")
        yield worst_table(worst, trace_url)
        yield note(
            "By the time to their first token, of the answered requests that did not wait for others' "
            "answers."
        )
    if (failures := failure_table(probes, trace_url)) is not None:
        yield heading("Failures")
        yield failures
    for run in runs:
        yield heading(f"{run.label}: workload, machine and command")
        shown = {name: run.headrace.get(name) for name in ("workload", "machine", "started_at", "goodput_ms")}
        yield facts(
            [
                ("file", text(run.path.name)),
                ("commit", text(run.headrace.get("commit") or "not known")),
                ("command", code(str(run.headrace.get("command") or "not known"))),
                *flat_facts(shown),
            ]
        )


def run_sentence(run: BenchRun) -> str:
    delivered = run.headrace.get("delivered_request_rate")
    of_them = "" if run.is_replay else " of them"
    sent = f", {delivered:.4g}/s{of_them} sent" if isinstance(delivered, int | float) else ""
    goodput = run.values.get("request_goodput")
    within = f"; {goodput:.4g}/s kept the limits that were given" if isinstance(goodput, int | float) else ""
    return (
        f"{run.label}{sent}: {run.values['completed']:,} requests answered, {run.num_failed:,} failed "
        f"({share_text(run.failed_share)}); {run.values['request_throughput']:.4g} requests/s{within}."
    )


def _run_table(runs: Sequence[BenchRun]) -> str:
    def latencies(run: BenchRun, name: str) -> str:
        return " / ".join(duration(one.value) for one in _estimates(run, name))

    return table(
        ["load", "answered", "failed", "requests/s", "output tokens/s", "TTFT p50 / p95 / p99",
         "TPOT p50 / p95 / p99", "E2EL p50 / p95 / p99"],
        (
            [
                number(run.label),
                number(f"{run.values['completed']:,}"),
                number(share_text(run.failed_share), broken=run.num_failed > 0),
                number(f"{run.values['request_throughput']:.4g}"),
                number(_amount(run.values.get("output_throughput"))),
                *(number(latencies(run, name)) for name in LATENCIES),
            ]
            for run in runs
        ),
    )  # fmt: skip


def _estimates(run: BenchRun, name: str) -> list[Estimate]:
    """From the requests, failures being infinite; else what the file says, with no interval."""
    if run.probe is None:
        values = [run.statistic_s(name, percent) for percent in PERCENTS]
        return [Estimate(value, value, value) for value in values]
    requests = requests_of(run.probe.measured)
    block = block_numbers(requests.due_s, run.probe.warm_cut_s, run.probe.end_s)
    return percentile_estimates(getattr(requests, f"{name}_s"), block, PERCENTS)


def _load(run: BenchRun) -> float:
    if run.is_replay:
        return float(run.headrace.get("delivered_request_rate") or run.values["request_throughput"])
    return run.rate if math.isfinite(run.rate) else float(run.concurrency or run.values.get("num_prompts", 1))


def _load_axis(runs: Sequence[BenchRun]) -> str:
    have_rates = [math.isfinite(run.rate) or run.is_replay for run in runs]
    if all(have_rates):
        return "offered rate (requests/s)"
    return "requests at once" if not any(have_rates) else "requests/s, or requests at once"


def _load_chart(name: str, runs: Sequence[BenchRun]) -> Chart | None:
    ordered = sorted(runs, key=_load)
    found = [_estimates(run, name) for run in ordered]
    if all(math.isnan(one.value) for estimates in found for one in estimates):
        return None
    rows: list[list[Any]] = [
        [_load(run), run.failed_share, *(end for one in estimates for end in (one.value, one.low, one.high))]
        for run, estimates in zip(ordered, found, strict=True)
    ]
    loads = [_load(run) for run in ordered]

    def draw(theme: Theme) -> Any:
        figure, (strip, panel) = new_figure(theme, 4.2, nrows=2, height_ratios=(1, 6), sharex=True)
        failure_strip(strip, loads, [100 * run.failed_share for run in ordered], theme)
        for place, percent in enumerate(PERCENTS):
            of_percent = [one[place] for one in found]
            values = np.array([one.value if math.isfinite(one.value) else np.nan for one in of_percent])
            highs = np.array([one.high if math.isfinite(one.high) else one.value for one in of_percent])
            panel.errorbar(
                loads, values, yerr=(values - [one.low for one in of_percent], np.nan_to_num(highs - values)),
                color=theme.series(place), linestyle=LINES[place], marker=MARKERS[place], markersize=5,
                capsize=2.5, label=f"p{percent:g}",
            )  # fmt: skip
        log_seconds(panel)
        panel.set_ylabel(LATENCIES[name].lower())
        panel.set_xlabel(_load_axis(runs))
        legend(panel, theme)
        return figure

    return Chart(
        name=f"{name}-load",
        title=f"{LATENCIES[name]} and load",
        caption=(
            f"{LATENCIES[name]} on a logarithmic axis, a point for each run. Bars are 90 % intervals of "
            "a bootstrap over "
            "tenths of a run's time, where the file holds its requests. Failures count as infinite: "
            "percentiles that "
            "they reach are left out, and the strip above is their share."
        ),
        draw=draw,
        header=["load", "failed_share"]
        + [f"p{percent:g}_{end}" for percent in PERCENTS for end in ("s", "low_s", "high_s")],
        rows=rows,
    )


def _throughput_chart(runs: Sequence[BenchRun]) -> Chart:
    ordered = sorted(runs, key=_load)
    loads = [_load(run) for run in ordered]
    answered = [float(run.values["request_throughput"]) for run in ordered]
    tokens = [float(run.values.get("output_throughput") or math.nan) for run in ordered]

    def draw(theme: Theme) -> Any:
        figure, (strip, above, below) = new_figure(theme, 4.8, nrows=3, height_ratios=(1, 3, 3), sharex=True)
        failure_strip(strip, loads, [100 * run.failed_share for run in ordered], theme)
        above.plot(loads, answered, color=theme.series(0), marker="o", markersize=5)
        above.set_ylabel("requests/s\nanswered")
        below.plot(loads, tokens, color=theme.series(2), marker="s", markersize=5)
        below.set_ylabel("output\ntokens/s")
        for panel in (above, below):
            panel.set_ylim(bottom=0)
        below.set_xlabel(_load_axis(runs))
        return figure

    rows: list[list[Cell]] = [
        [load, run.failed_share, one, token]
        for load, run, one, token in zip(loads, ordered, answered, tokens, strict=True)
    ]
    return Chart(
        name="throughput-load",
        title="Throughput and load",
        caption="Over the whole of each run, the time for its last answers included. The strip "
        "above is the share of failures.",
        draw=draw,
        header=["load", "failed_share", "requests_per_s", "output_tokens_per_s"],
        rows=rows,
    )


def _timeline(runs: Sequence[BenchRun]) -> Chart | None:
    from msgspec.structs import replace

    probes, begin_s = [], 0.0
    for run in runs:
        if run.probe is not None:
            probes.append(replace(run.probe, begin_s=begin_s))
            begin_s += run.probe.drained_s + GAP_S
    return timeline_chart(probes)


def _lengths(runs: Sequence[BenchRun]) -> Chart | None:
    lengths: dict[str, list[int]] = {"prompts": [], "answers": [], "answers as asked": []}
    for run in runs:
        for one in run.probe.requests if run.probe is not None else ():
            if one.num_prompt_tokens is not None:
                lengths["prompts"].append(one.num_prompt_tokens)
            if one.num_output_tokens is not None and not one.failed:
                lengths["answers"].append(one.num_output_tokens)
        lengths["answers as asked"] += [
            row["num_output_tokens_asked"]
            for row in run.headrace.get("requests") or ()
            if row.get("num_output_tokens_asked") is not None
        ]
    failed = sum(run.num_failed for run in runs)
    attempted = failed + sum(int(run.values["completed"]) for run in runs)
    return length_chart(lengths, failed / attempted if attempted else 0.0)


def _amount(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, int | float) and value < 1000
        else f"{value:,.0f}"
        if isinstance(value, int | float)
        else "–"
    )
