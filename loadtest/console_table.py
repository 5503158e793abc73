"""What a run looks like on the terminal: the table of `vllm bench serve`, and one for a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from loadtest.client_check import is_client_bound
from loadtest.distribution import Distribution
from loadtest.options import BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.result_file import Observations, RunSetting, percentile_name
from loadtest.summary import Summary

WIDTH = 50
MAX_ERRORS_SHOWN = 10
HEADINGS: Mapping[str, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}


def serving_table(
    options: BenchServeOptions,
    setting: RunSetting,
    summary: Summary,
    observations: Observations | None = None,
) -> str:
    """One run, in the look of `vllm bench serve`, with our due-time latencies below."""
    lines = [
        _bar("Serving Benchmark Result", "="),
        _row("Successful requests:", summary.completed),
        _row("Failed requests:", summary.failed),
    ]
    if setting.max_concurrency is not None:
        lines.append(_row("Maximum request concurrency:", setting.max_concurrency))
    if math.isfinite(options.request_rate):
        lines.append(_row("Request rate configured (RPS):", options.request_rate))
        lines.append(_row("Request rate delivered (RPS):", summary.delivered_request_rate))
    lines += [
        _row("Benchmark duration (s):", summary.duration_s),
        _row("Total input tokens:", summary.total_input_tokens),
        _row("Total generated tokens:", summary.total_output_tokens),
        _row("Request throughput (req/s):", summary.request_throughput),
    ]
    if options.goodput_ms:
        lines.append(_row("Request goodput (req/s):", summary.request_goodput))
    lines += [
        _row("Output token throughput (tok/s):", summary.output_throughput),
        _row("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s),
        _row("Peak concurrent requests:", summary.max_concurrent_requests),
        _row("Total token throughput (tok/s):", summary.total_token_throughput),
    ]
    for name in options.percentile_metrics:
        short, heading = HEADINGS[name]
        lines.append(_bar(heading, "-", spaced=False))
        lines += _statistics(short, summary.metrics_ms[name], options.metric_percentiles)
    lines.append(_bar("Due to First Content (failures: inf)", "-", spaced=False))
    lines += _statistics("TTFT due", summary.ttft_due_ms, options.metric_percentiles)
    if observations is not None:
        is_bound = is_client_bound(observations.validity)
        lines.append(_bar("Validity", "-", spaced=False))
        lines.append(_row("Load generator:", "CLIENT-BOUND" if is_bound else "kept up"))
        broken = [check.check for check in observations.validity if not check.passed]
        if broken:
            lines.append(_row("Checks that failed:", ", ".join(broken)))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def sweep_table(rows: Sequence[tuple[RunSetting, Summary]]) -> str:
    """One row per concurrency, as Markdown, ready for a document."""
    titles = (
        "concurrency",
        "requests",
        "failed",
        "output tok/s",
        "total tok/s",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "TPOT p50 ms",
        "TPOT p95 ms",
        "E2EL p95 ms",
        "wall s",
    )
    return _markdown([titles, *(_sweep_row(setting, summary) for setting, summary in rows)])


def _markdown(table: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)


def tenant_table(summary: Summary) -> str:
    """One row per tenant, as Markdown."""
    titles = ("tenant", "requests", "failed", "output tokens", "TTFT due p95 ms", "TPOT p95 ms")
    table = [titles]
    for name, tenant in summary.by_tenant.items():
        due, tpot = tenant.ttft_due_ms, tenant.tpot_ms
        table.append(
            (
                name or "-",
                str(tenant.attempted),
                str(tenant.failed),
                "n/a" if tenant.total_output_tokens is None else str(tenant.total_output_tokens),
                _figure(None if due is None else due.percentiles[95.0]),
                _figure(None if tpot is None else tpot.percentiles[95.0]),
            )
        )
    return _markdown(table)


def failure_lines(records: Sequence[RequestRecord]) -> Iterator[str]:
    failed = [record for record in records if not record.succeeded]
    if not failed:
        return
    yield f"{len(failed)} of {len(records)} requests failed (showing at most {MAX_ERRORS_SHOWN}):"
    for record in failed[:MAX_ERRORS_SHOWN]:
        yield f"  request {record.index}: {record.error}"


def _sweep_row(setting: RunSetting, summary: Summary) -> tuple[str, ...]:
    metrics = summary.metrics_ms

    def at(name: str, share: float) -> str:
        distribution = metrics[name]
        return _figure(None if distribution is None else distribution.percentiles[share])

    return (
        str(setting.max_concurrency),
        str(setting.num_prompts),
        str(summary.failed),
        _figure(summary.output_throughput),
        _figure(summary.total_token_throughput),
        at("ttft", 50),
        at("ttft", 95),
        at("tpot", 50),
        at("tpot", 95),
        at("e2el", 95),
        f"{summary.duration_s:.1f}",
    )


def _statistics(short: str, distribution: Distribution | None, shares: Sequence[float]) -> Iterator[str]:
    if distribution is None:
        yield _row(f"Mean {short} (ms):", None)
        return
    yield _row(f"Mean {short} (ms):", distribution.mean)
    yield _row(f"Median {short} (ms):", distribution.median)
    for share in shares:
        name = percentile_name(share).upper()
        yield _row(f"{name} {short} (ms):", distribution.percentiles[share])


def _bar(title: str, fill: str, *, spaced: bool = True) -> str:
    return (f" {title} " if spaced else title).center(WIDTH, fill)


def _row(name: str, value: float | int | str | None) -> str:
    shown = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()


def _figure(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "n/a"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
