"""Was the load made as it was meant, or was the generator itself the bottleneck?

Pure functions over records and samples. Whoever reports a figure asks them first: latencies of a
generator that cannot keep up are its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.arrivals import NANOSECONDS_PER_SECOND
from loadtest.distribution import percentile
from loadtest.generator_samples import GeneratorSamples
from loadtest.request_record import RequestRecord
from loadtest.validity import ValidityCheck

NANOSECONDS_PER_MILLISECOND = 1_000_000
HELD_BACK = "held_back_by_max_concurrency"  # fails through no fault of the generator
# The checks that tell of the generator itself. Others stand beside them in a list: of the server, of what
# the user declared.
CLIENT_CHECKS = (
    "dispatch_lag_p99_ms",
    "delivered_rate_error",
    "loop_lag_p99_ms",
    "cpu_share",
    "collector_pause_ms",
    "client_failures",
)
# Start and end of a run are all computing: a share of less time than this tells nothing.
MIN_SAMPLED_S = 0.2


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a generator may do wrong before its figures are called client-bound."""

    dispatch_lag_p99_ms: float = 10.0
    rate_error: float = 0.01  # of the rate that was asked for
    loop_lag_p99_ms: float = 10.0
    cpu_share: float = 0.9  # of one core, the busiest process
    collector_pause_ms: float = 10.0


def check_client(
    records: Sequence[RequestRecord],
    samples: Sequence[GeneratorSamples],
    limits: ClientLimits | None = None,
    *,
    is_open_loop: bool = True,
) -> list[ValidityCheck]:
    """All checks, passed or not. In a closed loop nothing is due, so that lag and rate say nothing."""
    limits = limits or ClientLimits()
    checks = [
        _loop_lag(samples, limits),
        _cpu_share(samples, limits),
        _collector_pauses(samples, limits),
        _client_failures(records),
    ]
    if is_open_loop:
        of_schedule = [_dispatch_lag(records, limits), _rate(records, limits)]
        checks = [*of_schedule, *checks, _held_back(records, limits)]
    return checks


def is_client_bound(checks: Sequence[ValidityCheck]) -> bool:
    """Whether the figures are the generator's. A limit on the concurrency is the user's own wish, and
    what a server did otherwise than declared is no fault of the generator."""
    return bool(client_bound_reasons(checks))


def client_bound_reasons(checks: Sequence[ValidityCheck]) -> list[str]:
    return [check.reason for check in checks if not check.passed and check.check in CLIENT_CHECKS]


def other_broken_reasons(checks: Sequence[ValidityCheck]) -> list[str]:
    """Of conditions that are broken, but not by the generator."""
    return [check.reason for check in checks if not check.passed and check.check not in CLIENT_CHECKS]


def _dispatch_lag(records: Sequence[RequestRecord], limits: ClientLimits) -> ValidityCheck:
    """Of later turns of a conversation too: they are due when their user has thought."""
    lags_ns = sorted(lag for record in records if (lag := record.generator_lag_ns) is not None)
    if not lags_ns:
        return _unknown("dispatch_lag_p99_ms", limits.dispatch_lag_p99_ms, "no request was sent")
    lag_ms = percentile(lags_ns, 99) / NANOSECONDS_PER_MILLISECOND
    return _at_most(
        "dispatch_lag_p99_ms",
        lag_ms,
        limits.dispatch_lag_p99_ms,
        f"the generator sent 99% of the requests within {lag_ms:.2f} ms of their due times",
    )


def _rate(records: Sequence[RequestRecord], limits: ClientLimits) -> ValidityCheck:
    """Dispatched against due, between the first and the last of them. Waits for a slot are not in it."""
    due = [record.t_due_ns for record in records if record.turn == 0]
    taken_up = [
        record.t_dispatch_ns for record in records if record.turn == 0 and record.t_dispatch_ns is not None
    ]
    asked, delivered = _rate_of(due), _rate_of(taken_up)
    if asked is None or delivered is None:
        return _unknown("delivered_rate_error", limits.rate_error, "too few requests for a rate")
    error = abs(1 - delivered / asked)
    # The ends of a schedule move by a lag each; of a short run that is more than its rate tells.
    tolerated = limits.rate_error + 2 * limits.dispatch_lag_p99_ms / 1000 * asked / len(due)
    told = f"asked for {asked:.1f} requests/s, dispatched {delivered:.1f}"
    return ValidityCheck(
        check="delivered_rate_error", passed=error <= tolerated, value=error, limit=tolerated, reason=told
    )


def _held_back(records: Sequence[RequestRecord], limits: ClientLimits) -> ValidityCheck:
    waits_ns = sorted(
        record.t_ready_ns - record.t_dispatch_ns
        for record in records
        if record.t_ready_ns is not None and record.t_dispatch_ns is not None
    )
    if not waits_ns:
        return _unknown(HELD_BACK, limits.dispatch_lag_p99_ms, "no request had a slot")
    wait_ms = percentile(waits_ns, 99) / NANOSECONDS_PER_MILLISECOND
    return _at_most(
        HELD_BACK,
        wait_ms,
        limits.dispatch_lag_p99_ms,
        f"99% of the requests waited at most {wait_ms:.2f} ms for a free slot of --max-concurrency",
    )


def _loop_lag(samples: Sequence[GeneratorSamples], limits: ClientLimits) -> ValidityCheck:
    """The worst of the processes. What comes back is read and timed as late as this."""
    lags_ms = [
        percentile(sorted(one.loop_lags_ns), 99) / NANOSECONDS_PER_MILLISECOND
        for one in samples
        if one.loop_lags_ns
    ]
    if not lags_ms:
        return _unknown("loop_lag_p99_ms", limits.loop_lag_p99_ms, "the run was too short to sample it")
    told = f"the generator's event loop was at most {max(lags_ms):.2f} ms late in 99% of samples"
    return _at_most("loop_lag_p99_ms", max(lags_ms), limits.loop_lag_p99_ms, told)


def _cpu_share(samples: Sequence[GeneratorSamples], limits: ClientLimits) -> ValidityCheck:
    if not samples:
        return _unknown("cpu_share", limits.cpu_share, "the generator was not sampled")
    sampled = [one.cpu_share for one in samples if one.wall_s >= MIN_SAMPLED_S]
    if not sampled:
        return _unknown("cpu_share", limits.cpu_share, "the run was too short to sample it")
    share = max(sampled)
    told = f"the generator's busiest process used {share:.0%} of a core"
    return _at_most("cpu_share", share, limits.cpu_share, told)


def _collector_pauses(samples: Sequence[GeneratorSamples], limits: ClientLimits) -> ValidityCheck:
    longest_ns = max((pause.duration_ns for one in samples for pause in one.collector_pauses), default=0)
    longest_ms = longest_ns / NANOSECONDS_PER_MILLISECOND
    told = f"the generator's garbage collector paused it for at most {longest_ms:.2f} ms"
    return _at_most("collector_pause_ms", longest_ms, limits.collector_pause_ms, told)


def _client_failures(records: Sequence[RequestRecord]) -> ValidityCheck:
    failed = [record for record in records if record.failure == "client"]
    told = f"{len(failed)} requests failed because the generator's machine had no socket left"
    if failed:
        told += f" ({failed[0].error})"
    return _at_most("client_failures", len(failed), 0, told)


def _rate_of(times_ns: Sequence[int]) -> float | None:
    span_ns = max(times_ns, default=0) - min(times_ns, default=0)
    return None if span_ns == 0 else (len(times_ns) - 1) / span_ns * NANOSECONDS_PER_SECOND


def _at_most(check: str, value: float, limit: float, reason: str) -> ValidityCheck:
    assert not math.isnan(value), "a figure that is none"
    passed = value <= limit
    if not passed:
        reason += f"; the limit is {limit:g}"
    return ValidityCheck(check=check, passed=passed, value=value, limit=limit, reason=reason)


def _unknown(check: str, limit: float, reason: str) -> ValidityCheck:
    return ValidityCheck(check=check, passed=True, value=None, limit=limit, reason=reason)
