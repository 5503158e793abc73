"""A search as one page of HTML, which needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loadtest.knee.observations import good_share
from loadtest.knee.result import KneeResult, TierResult
from loadtest.report.chart import Chart, duration
from loadtest.report.interval import percentile_estimates
from loadtest.report.latency_shares import knee_share_charts
from loadtest.report.lengths import length_chart
from loadtest.report.page import (
    Cell,
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
from loadtest.report.phase_costs import phase_chart
from loadtest.report.rate_curves import rate_charts, rate_points, slo_tier
from loadtest.report.timeline import timeline_chart
from loadtest.report.words import STATUS_WORDS, headline, is_broken, share_text, verdict
from loadtest.report.worst_requests import check_trace_url, failure_table, worst_requests, worst_table
from loadtest.validity import ValidityCheck

BYTES_PER_GIB = 2**30


def write_html(result: KneeResult, path: Path, *, trace_url: str | None = None, flag: str = "--html") -> None:
    """Raises ConfigError for a file that cannot be written, or a link without `{trace_id}`."""
    check_trace_url(trace_url)
    write_page(knee_page(result, trace_url), path, flag)


def knee_charts(result: KneeResult) -> list[Chart]:
    """All that the probes give; in the order of the page."""
    charts: list[Chart | None] = [
        *rate_charts(result),
        *knee_share_charts(result),
        timeline_chart(result.probes),
        phase_chart(result.phases, result.seconds_spent, result.budget_s),
        _lengths(result),
    ]
    return [chart for chart in charts if chart is not None]


def knee_page(result: KneeResult, trace_url: str | None = None) -> str:
    return whole_page(headline(result), _sections(result, trace_url, broken=is_broken(result)))


def _sections(result: KneeResult, trace_url: str | None, *, broken: bool) -> Iterator[str]:
    yield verdict_box(verdict(result), broken=broken)
    if result.tiers:
        yield _tier_table(result.tiers)
    for chart in knee_charts(result):
        yield from figure(chart)
        if chart.name == "timeline" and (probes := _probe_table(result)):
            yield heading("Open-loop probes")
            yield probes
            yield note(
                "Latencies of the measured window, failures being infinite; TTFT counts from when a "
                "request was due."
            )
    worst = worst_requests(result.probes, result.slo)
    if worst:
        yield heading("The worst requests")
        yield worst_table(worst, trace_url)
        yield note("Answered requests of open-loop probes, by how far they broke a limit.")
    failures = failure_table(result.probes, trace_url)
    if failures is not None:
        yield heading("Failures")
        yield failures
    yield heading("Can this be believed?")
    yield _validity_table(result.validity) if result.validity else note("Nothing was checked.")
    yield heading("Not reported by the server")
    yield note("; ".join(result.not_reported_by_server) or "Nothing is missing.")
    yield heading("The workload as it was sent")
    yield facts([*flat_facts(result.workload), *_lengths_told(result)])
    yield heading("Where, when and how")
    yield facts(_provenance(result))


def _tier_table(tiers: Iterable[TierResult]) -> str:
    def row(tier: TierResult) -> list[Cell]:
        capacity = tier.slo_capacity
        return [
            text(tier.name),
            number(f"{tier.arrival_cv:g}"),
            text(STATUS_WORDS[tier.status], broken=tier.status in ("invalid", "client_bound", "infeasible")),
            number(_amount(capacity.rate if capacity else None)),
            number(f"{capacity.ci90[0]:.3g} – {capacity.ci90[1]:.3g}" if capacity else "–"),
            text(capacity.method.replace("_", " ") if capacity else None),
            number(_amount(capacity.n_eff if capacity else None)),
            number(_amount(capacity.design_effect if capacity else None)),
            text(tier.binding_constraint),
        ]

    return table(
        ["tier", "CV of arrivals", "verdict", "capacity (req/s)", "90 % interval", "method",
         "effective sample", "design effect", "breaks first"],
        map(row, tiers),
    )  # fmt: skip


def _probe_table(result: KneeResult) -> str | None:
    points = rate_points(result.probes)
    tiers = list({row.name: slo_tier(row) for row in result.slo}.values())

    def latencies(values: Any, block: Any) -> str:
        return " / ".join(
            duration(one.value) for one in percentile_estimates(values, block, (50.0, 95.0, 99.0))
        )

    rows = [
        [
            number(f"{point.rate:.3g}/s"),
            number(f"{point.cv:g}"),
            text(point.kind.replace("_", " ") + (", ended early" if point.ended_early else "")),
            number(f"{len(point.requests):,}"),
            number(share_text(point.failed_share), broken=point.failed_share > 0),
            number(latencies(point.requests.ttft_s, point.block)),
            number(latencies(point.requests.tpot_s, point.block)),
            *(number(_share(good_share(point.requests, tier))) for tier in tiers),
        ]
        for point in points
    ]
    head = ["rate", "CV", "probe", "requests", "failed", "TTFT p50 / p95 / p99", "TPOT p50 / p95 / p99"]
    return table([*head, *(f"kept {tier.name}" for tier in tiers)], rows) if rows else None


def _share(good: Any) -> str:
    known = good[good == good]  # not nan
    return f"{100 * float(known.mean()):.1f} %" if len(known) else "–"


def _validity_table(checks: Iterable[ValidityCheck]) -> str:
    def outcome(check: ValidityCheck) -> Cell:
        if not check.passed:
            return text("BROKEN", broken=True)
        return text("holds" if check.value is not None else "not measured")

    return table(
        ["check", "outcome", "value", "limit", "remark"],
        (
            [
                text(one.check),
                outcome(one),
                number(_amount(one.value)),
                number(_amount(one.limit)),
                text(one.reason),
            ]
            for one in checks
        ),
    )


def _lengths(result: KneeResult) -> Chart | None:
    requests = [one for probe in result.probes for one in probe.requests]
    prompts = [one.num_prompt_tokens for one in requests if one.num_prompt_tokens is not None]
    answers = [
        one.num_output_tokens
        for one in requests
        if one.num_output_tokens is not None and not one.failed and not one.cut_off
    ]
    failed_share = sum(one.failed for one in requests) / len(requests) if requests else 0.0
    asked = {
        name: float(result.workload[key])
        for name, key in (("mean of prompts", "random_input_len"), ("mean of answers", "random_output_len"))
        if isinstance(result.workload.get(key), int | float)
    }
    return length_chart({"prompts": prompts, "answers": answers}, failed_share, asked)


def _lengths_told(result: KneeResult) -> Iterator[tuple[str, Cell]]:
    requests = [one for probe in result.probes for one in probe.requests if not one.failed]
    for name, of in (("prompts", "num_prompt_tokens"), ("answers", "num_output_tokens")):
        known = [getattr(one, of) for one in requests if getattr(one, of) is not None]
        if known:
            yield f"mean length of {name} (tokens)", text(f"{sum(known) / len(known):.4g}")


def _provenance(result: KneeResult) -> Iterator[tuple[str, Cell]]:
    yield "started", text(result.started_at)
    yield "server", text(f"{result.url}, model {result.model}")
    yield "command", code(result.command)
    yield "commit", text(result.commit or "not known")
    yield "spent", text(f"{result.seconds_spent:.0f} s of {result.budget_s:.0f} s")
    for name, cell in flat_facts(result.machine):
        yield f"machine of the load generator: {name}", cell


def flat_facts(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Cell]]:
    """Nested values as rows of `facts`; what is None is left out."""
    for name, value in values.items():
        shown = f"{before}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat_facts(value, f"{shown}: ")
        elif name == "memory_bytes" and isinstance(value, int):
            yield f"{before}memory".replace("_", " "), text(f"{value / BYTES_PER_GIB:.1f} GiB")
        elif value is not None:
            yield shown, text(", ".join(map(str, value)) if isinstance(value, list) else value)


def _amount(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
