"""Alert rules for Prometheus, with thresholds from a measurement, over the metrics of gateways.

Each gateway reports every engine, so engines are first counted once, by `max by (model_name, engine)`, and
only then added up. Counters are added up over gateways, as each counts its own requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.plan.thresholds import SHARE_OF_CAPACITY, Thresholds
from shared.errors import ConfigError
from shared.metrics import INTER_TOKEN_BUCKETS_S, REQUEST_BUCKETS_S, TTFT_BUCKETS_S

GROUP = "headrace-capacity"
REMEMBERED = "1h"


@dataclass(frozen=True, slots=True)
class Timing:
    """`window_s`: of rates and means; `pending_s`: how long a condition must hold."""

    window_s: int = 300
    pending_s: int = 120
    stuck_pending_s: int = 60  # nobody is served: sooner
    stuck_window_s: int = 60  # without a step; four scrapes of the usual 15 s

    @property
    def window(self) -> str:
        return duration_text(self.window_s)


def timing_of(window_s: float, pending_s: float) -> Timing:
    """Whole seconds, as Prometheus writes them; where nobody is served, no longer than usual.

    Raises ConfigError for less than a second.
    """
    for seconds, flag in ((window_s, "--alert-window"), (pending_s, "--alert-for")):
        if seconds < 1:
            raise ConfigError(f"must be at least 1s, got {1000 * seconds:g}ms", flag)
    window, pending, usual = round(window_s), round(pending_s), Timing()
    return Timing(window, pending, min(usual.stuck_pending_s, pending), min(usual.stuck_window_s, window))


@dataclass(frozen=True, slots=True)
class AlertRule:
    name: str
    expression: str
    pending_s: int
    severity: str
    summary: str
    description: str

    def document(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": duration_text(self.pending_s),
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


def alert_rules(
    limits: Thresholds, model: str | None = None, timing: Timing | None = None
) -> tuple[list[AlertRule], list[str]]:
    """Rules for one model, or for each that is served; and why others were left out."""
    timing = timing or Timing()
    rules: list[AlertRule] = []
    left_out: list[str] = []
    rules += _load_rules(limits, model, timing)
    if limits.running is None:
        left_out.append("HeadraceRunningNearCapacity: the server did not report how many requests ran")
    if limits.waiting is None:
        left_out.append("HeadraceQueueGrows: the server did not report how many requests waited")
    if limits.in_flight is None:
        left_out.append("HeadraceNearCapacity: nothing was measured that it could be read from")
    rules += _latency_rules(limits, model, timing, left_out)
    rules += _fault_rules(limits, model, timing)
    return rules, left_out


def rules_document(rules: Sequence[AlertRule]) -> dict[str, Any]:
    return {"groups": [{"name": GROUP, "rules": [rule.document() for rule in rules]}]}


def in_flight_expression(model: str | None, window: str | None = None) -> str:
    """Requests that run or wait, over all engines of a model."""
    return (
        f"sum by (model_name) ({_engine_mean('vllm:num_requests_running', model, window)} + "
        f"{_engine_mean('vllm:num_requests_waiting', model, window)})"
    )


def duration_text(seconds: int) -> str:
    return f"{seconds // 60}m" if seconds % 60 == 0 and seconds else f"{seconds}s"


def _selected(metric: str, model: str | None, *matchers: str) -> str:
    every = [*matchers] if model is None else [f"model_name={_quoted(model)}", *matchers]
    return metric + (f"{{{','.join(every)}}}" if every else "")


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _engine_mean(metric: str, model: str | None, window: str | None) -> str:
    selected = _selected(metric, model)
    inside = selected if window is None else f"avg_over_time({selected}[{window}])"
    return f"max by (model_name, engine) ({inside})"


def _number(value: float) -> str:
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1e4 else repr(round(value, 9))


def _load_rules(limits: Thresholds, model: str | None, timing: Timing) -> Iterator[AlertRule]:
    window, where = timing.window, f"{SHARE_OF_CAPACITY:.0%} of the measured capacity"
    if limits.running is not None:
        yield AlertRule(
            "HeadraceRunningNearCapacity",
            f"avg by (model_name) ({_engine_mean('vllm:num_requests_running', model, window)}) > "
            f"{_number(limits.running)}",
            timing.pending_s,
            "warning",
            "Engines of {{ $labels.model_name }} run as many requests as at " + where,
            f"On average {{{{ $value | humanize }}}} requests run on each engine; "
            f"{_number(limits.running)} did at "
            f"{_number(limits.rate)} requests/s per engine. Add replicas.",
        )
    if limits.waiting is not None:
        yield AlertRule(
            "HeadraceQueueGrows",
            f"avg by (model_name) ({_engine_mean('vllm:num_requests_waiting', model, window)}) > "
            f"{_number(limits.waiting)}",
            timing.pending_s,
            "warning",
            "Requests queue in front of engines of {{ $labels.model_name }}",
            f"On average {{{{ $value | humanize }}}} requests wait for each engine; "
            f"{_number(limits.waiting)} is what is "
            f"to be expected at {where}. Add replicas.",
        )
    if limits.in_flight is not None:
        source = "by the client's count" if limits.is_in_flight_of_client else "by the server's count"
        engines = (
            f"sum by (model_name) (max by (model_name, engine) ({_selected('headrace_engine_up', model)}))"
        )
        yield AlertRule(
            "HeadraceNearCapacity",
            f"{in_flight_expression(model, window)} / ({engines} > 0) > {_number(limits.in_flight)}",
            timing.pending_s,
            "warning",
            "{{ $labels.model_name }} is above " + where,
            f"{{{{ $value | humanize }}}} requests are in flight for each engine that is up; "
            f"{_number(limits.in_flight)} were "
            f"at {where}, {source}. Add replicas.",
        )
    yield AlertRule(
        "HeadraceKvCacheNearlyFull",
        f"{_engine_mean('vllm:kv_cache_usage_perc', model, window)} > {_number(limits.kv_usage)}",
        timing.pending_s,
        "warning",
        "The KV cache of {{ $labels.engine }} is nearly full",
        "{{ $value | humanizePercentage }} of its blocks are in use: sequences will be put back for "
        "lack of blocks."
        + (
            ""
            if limits.kv_usage_at_capacity is None
            else f" {limits.kv_usage_at_capacity:.0%} were in use, in peaks, at the measured capacity."
        ),
    )


def _latency_rules(
    limits: Thresholds, model: str | None, timing: Timing, left_out: list[str]
) -> Iterator[AlertRule]:
    """A quantile above a limit. On the edge of a bucket that is exact; else it lies between two edges."""
    for name, metric, buckets, limit_s, words in (
        ("HeadraceSlowFirstToken", "vllm:time_to_first_token_seconds", TTFT_BUCKETS_S, limits.ttft_s,
         "first tokens"),
        ("HeadraceSlowTokens", "headrace_variant_time_per_output_token_seconds", INTER_TOKEN_BUCKETS_S,
         limits.tpot_s, "tokens behind the first"),
        ("HeadraceSlowAnswers", "vllm:e2e_request_latency_seconds", REQUEST_BUCKETS_S, limits.e2el_s,
         "whole answers"),
    ):  # fmt: skip
        if limit_s is None:
            continue
        if limit_s >= buckets[-1]:
            left_out.append(f"{name}: the limit of {limit_s:g} s is beyond the last bucket of {metric}")
            continue
        # By variant, not by model: one model may serve several.
        by = "route, variant" if metric.startswith("headrace_variant_") else "model_name"
        selected = f"{metric}_bucket" if by == "route, variant" else _selected(f"{metric}_bucket", model)
        exact = (
            "The limit is the edge of a bucket, so this is exact."
            if limit_s in buckets
            else "The limit lies between two buckets, so this is interpolated."
        )
        who = (
            "{{ $labels.route }} ({{ $labels.variant }})"
            if by == "route, variant"
            else "{{ $labels.model_name }}"
        )
        yield AlertRule(
            name,
            f"histogram_quantile({_number(limits.attainment)}, sum by (le, {by}) "
            f"(rate({selected}[{timing.window}]))) > {_number(limit_s)}",
            timing.pending_s,
            "critical",
            f"The promise on {words} of {who} is broken",
            f"{_number(100 * limits.attainment)} % of the requests must keep {_number(limit_s)} s, and "
            f"{{{{ $value | humanizeDuration }}}} is what so many keep. {exact}",
        )


def _fault_rules(limits: Thresholds, model: str | None, timing: Timing) -> Iterator[AlertRule]:
    window, stuck = timing.window, duration_text(timing.stuck_window_s)
    failed = f'sum(rate(headrace_variant_requests_total{{outcome="failed"}}[{window}]))'
    # Refused ones are the client's: a flood of them must not hide what fails.
    ended = f'sum(rate(headrace_variant_requests_total{{outcome!="refused"}}[{window}]))'
    yield AlertRule(
        "HeadraceErrors",
        f"{failed} / {ended} > {_number(limits.error_share)}",
        timing.pending_s,
        "critical",
        "Requests fail",
        "{{ $value | humanizePercentage }} of the requests that were let in ended in an error of ours, "
        "broken streams included.",
    )
    up = f"max by (model_name, engine) ({_selected('headrace_engine_up', model)})"
    running = f"max by (model_name, engine) ({_selected('vllm:num_requests_running', model)})"
    waiting = f"max by (model_name, engine) ({_selected('vllm:num_requests_waiting', model)})"
    steps = f"max by (model_name, engine) (rate({_selected('headrace_engine_steps_total', model)}[{stuck}]))"
    yield AlertRule(
        "HeadraceUpButNotServing",
        f"(({waiting} > 0 and {running} == 0) or ({running} + {waiting} > 0 and {steps} == 0)) and {up} == 1",
        timing.stuck_pending_s,
        "critical",
        "Engine {{ $labels.engine }} is up and serves nobody",
        "It holds requests, and either runs none of them or makes no step. Restart it.",
    )
    # An engine that is gone leaves no series behind: a model is missed for as long as it is remembered.
    engine_up = _selected("headrace_engine_up", model)
    yield AlertRule(
        "HeadraceNoEngine",
        f"(max by (model_name) (max_over_time({engine_up}[{REMEMBERED}])) unless "
        f"max by (model_name) ({engine_up}) == 1) or absent({engine_up})",
        timing.stuck_pending_s,
        "critical",
        "No engine of {{ $labels.model_name }} takes requests",
        f"It had one within {REMEMBERED}. Either none runs, or none is reached by the gateways.",
    )
    yield AlertRule(
        "HeadraceNoGateway",
        "absent(headrace_requests_in_flight)",
        timing.stuck_pending_s,
        "critical",
        "No gateway can be scraped",
        "Prometheus gets no metrics from any gateway: none runs, or its address has changed.",
    )
