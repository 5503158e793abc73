"""The requests to look at first, each with its trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from string import Formatter

from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.knee.result import SloRow
from loadtest.report.chart import duration
from loadtest.report.page import Cell, code, number, table, text
from loadtest.report.rate_curves import slo_tier
from shared.errors import ConfigError

NUM_SHOWN = 10
TRACE_URL_FLAG = "--trace-url"


def check_trace_url(template: str | None) -> None:
    """Raises ConfigError for what is no link with a place for the id."""
    if template is None:
        return
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{template!r} has unpaired braces", TRACE_URL_FLAG) from error
    if set(names) != {"trace_id"}:
        raise ConfigError(f"{template!r} must hold {{trace_id}}, and no other braces", TRACE_URL_FLAG)
    if not template.startswith(("http://", "https://")):
        raise ConfigError(f"{template!r} must begin with http:// or https://", TRACE_URL_FLAG)


def worst_requests(probes: Iterable[Probe], slo: Sequence[SloRow]) -> list[tuple[Probe, ProbedRequest]]:
    """Answered ones of open-loop probes: by how far they broke a limit of a tier, without one by TTFT."""
    tiers = [slo_tier(row) for row in slo]

    def badness(one: ProbedRequest) -> float:
        known = {"ttft": one.ttft_due, "tpot": one.tpot, "e2el": one.e2el_due}
        ratios = [
            latency / limit_s
            for tier in tiers
            for name, limit_s in tier.limits_s.items()
            if (latency := known[name]) is not None and not math.isnan(latency)
        ]
        return max(ratios, default=one.ttft_due)

    answered = [
        (probe, one)
        for probe in probes
        if probe.rate is not None
        for one in probe.measured
        if not one.failed and not math.isnan(one.ttft_due)
    ]
    return sorted(answered, key=lambda pair: -badness(pair[1]))[:NUM_SHOWN]


def worst_table(worst: Sequence[tuple[Probe, ProbedRequest]], trace_url: str | None) -> str:
    return table(
        ["probe", "due at", "first token", "per token", "last token", "prompt", "answer", "trace"],
        (
            [
                text(f"{probe.rate:.3g}/s" if probe.rate is not None else probe.kind),
                number(f"{probe.begin_s + one.due_s:.1f} s"),
                number(duration(one.ttft_due)),
                number("–" if one.tpot is None else duration(one.tpot)),
                number(duration(one.e2el_due)),
                number(_count(one.num_prompt_tokens)),
                number(_count(one.num_output_tokens)),
                _trace(one.trace_id, trace_url),
            ]
            for probe, one in worst
        ),
    )


def failure_table(probes: Iterable[Probe], trace_url: str | None) -> str | None:
    """What failed, by its error, with one trace of each; None if nothing did."""
    by_error: dict[str, list[ProbedRequest]] = {}
    for probe in probes:
        for one in probe.requests:
            if one.failed:
                by_error.setdefault(one.error or "no reason was told", []).append(one)
    if not by_error:
        return None
    ordered = sorted(by_error.items(), key=lambda item: -len(item[1]))
    return table(
        ["requests", "error", "trace of one"],
        (
            [number(f"{len(some):,}"), text(error), _trace(some[0].trace_id, trace_url)]
            for error, some in ordered[:NUM_SHOWN]
        ),
    )


def _trace(trace_id: str | None, trace_url: str | None) -> Cell:
    if trace_id is None:
        return text(None)
    if trace_url is None:
        return code(trace_id)
    link = escape(trace_url.format(trace_id=trace_id))
    return Cell(f'<a href="{link}"><code>{escape(trace_id)}</code></a>')


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
