"""Whether the numbers may be believed: each condition with its value, its limit and, where broken, its
reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadtest.knee.failures import NEARLY_ALL, commonest_errors
from loadtest.knee.observations import requests_of
from loadtest.knee.probe import Probe, ProbedRequest, ServerSample
from loadtest.knee.prober import ClientCheck
from loadtest.knee.slo import SloTier
from loadtest.validity import ValidityCheck

MAX_DISPATCH_LAG_S = 0.010
MAX_LAG_SHARE = 0.02  # of a limit that counts from the due time: so much lateness decides nothing
MAX_RATE_ERROR = 0.01
MAX_ERROR_SHARE = 0.01
MAX_HIT_DRIFT = 0.02
MAX_LITTLE_ERROR = 0.05
MAX_CV_ERROR = 0.10
NUM_STANDARD_ERRORS = 3.5  # of counts and spreads that are random by design
OPEN_KINDS = ("open_loop", "validation")
COUNTED_KINDS = ("unloaded", *OPEN_KINDS)


def check_validity(
    probes: Sequence[Probe],
    tiers: Sequence[SloTier],
    declared_hit_share: float,
    client: ClientCheck | None,
) -> list[ValidityCheck]:
    """One row per condition, each with its worst probe."""
    open_loop = [probe for probe in probes if probe.kind in OPEN_KINDS and probe.requests]
    loaded = [probe for probe in probes if probe.kind != "unloaded" and probe.requests]
    checks = [
        _client(client, tiers),
        _delivered_rate(open_loop),
        _dispatch_lag(open_loop, tiers),
        _arrival_cv(open_loop),
        _errors([row for probe in probes if probe.kind in COUNTED_KINDS for row in probe.requests]),
        _saturation_errors([row for probe in probes if probe.kind == "saturation" for row in probe.requests]),
        _cut_off(open_loop),
        _little(loaded),
        _cache_hits(loaded, declared_hit_share),
        _throttling(loaded),
        _token_counts(probes, tiers),
    ]
    return [check for check in checks if check is not None]


def _client(client: ClientCheck | None, tiers: Sequence[SloTier]) -> ValidityCheck | None:
    if client is None:
        return None
    if client.refused_share >= NEARLY_ALL:
        return ValidityCheck(
            check="client_check",
            passed=False,
            value=None,
            limit=None,
            reason="no server took the requests of the generator's own check",
        )
    return _row(
        "client_check",
        client.dispatch_lag_p99_s,
        lag_limit_s(tiers),
        f"the generator alone, at {client.rate:.3g} requests/s, sends its requests late",
    )


def _delivered_rate(probes: Sequence[Probe]) -> ValidityCheck | None:
    """Of what was due, what was sent in time: what the arrival law drew is no fault, what was left behind
    is."""
    worst = 0.0
    for probe in probes:
        if probe.rate is None:
            continue
        due = [row for row in probe.requests if row.due_s < probe.end_s]
        sent = sum(_was_sent(row, probe.end_s + 1.0) for row in due)
        expected = probe.rate * probe.end_s
        spread = NUM_STANDARD_ERRORS * max(1.0, probe.cv or 0.0) / math.sqrt(max(expected, 1.0))
        drawn = max(0.0, abs(len(due) / max(expected, 1e-9) - 1) - spread)
        worst = max(worst, 1 - sent / max(len(due), 1), drawn)
    return (
        _row("delivered_rate", worst, MAX_RATE_ERROR, "not all requests were sent when they were due")
        if probes
        else None
    )


def _was_sent(row: ProbedRequest, until_s: float) -> bool:
    """An attempt that the server refused is the server's doing: it was made."""
    at_s = row.end_s if row.sent_s is None and row.failed else row.sent_s
    return at_s is not None and at_s <= until_s


def _dispatch_lag(probes: Sequence[Probe], tiers: Sequence[SloTier]) -> ValidityCheck | None:
    lags = [
        late_percentile(lag)
        for probe in probes
        if (lag := [row.dispatch_lag for row in probe.requests if row.dispatch_lag is not None])
    ]
    if not lags:
        return None
    return _row("dispatch_lag_p99", max(lags), lag_limit_s(tiers), "requests were sent late: client-bound")


def lag_limit_s(tiers: Sequence[SloTier]) -> float:
    """How late the generator may be: 10 ms, or little beside every limit that its lateness counts in."""
    limits = [limit for tier in tiers for limit in (tier.ttft_s, tier.e2el_s) if limit is not None]
    return max(MAX_DISPATCH_LAG_S, MAX_LAG_SHARE * min(limits, default=0.0))


def late_percentile(lags_s: Sequence[float]) -> float:
    """The 99th percentile, which of few requests is the second latest: a single one proves nothing."""
    return sorted(lags_s)[-1 - min(max(1, len(lags_s) // 100), len(lags_s) - 1)]


def _arrival_cv(probes: Sequence[Probe]) -> ValidityCheck | None:
    """Pooled over probes of one law: one probe has too few gaps."""
    worst: tuple[float, float] | None = None
    for cv in sorted({probe.cv for probe in probes if probe.cv}):
        gaps = np.concatenate([_relative_gaps(probe) for probe in probes if probe.cv == cv])
        if len(gaps) < 50:
            continue
        error = abs(float(gaps.std() / gaps.mean()) / cv - 1)
        # The spread of a sample's own spread, for gamma gaps: their kurtosis is 3 + 6 cv².
        limit = max(MAX_CV_ERROR, NUM_STANDARD_ERRORS * math.sqrt((2 + 6 * cv**2) / (4 * len(gaps))))
        if worst is None or error / limit > worst[0] / worst[1]:
            worst = (error, limit)
    if worst is None:
        return None
    return _row("arrival_cv", worst[0], worst[1], "the gaps between requests do not vary as asked")


def _relative_gaps(probe: Probe) -> np.ndarray:
    due = np.sort([row.due_s for row in probe.requests])
    return np.diff(due) * (probe.rate or 0.0)


def _errors(rows: Sequence[ProbedRequest]) -> ValidityCheck | None:
    if not rows:
        return None
    share = sum(row.failed for row in rows) / len(rows)
    return _row("error_share", share, MAX_ERROR_SHARE, f"requests failed: {commonest_errors(rows)}")


def _saturation_errors(rows: Sequence[ProbedRequest]) -> ValidityCheck | None:
    """A full server may say 503, that it is; anything else means that the rate is not that of a full one."""
    wrong = [row for row in rows if row.failed and not row.error.startswith("HTTP 503")]
    if not rows:
        return None
    return _row(
        "saturation_errors",
        len(wrong) / len(rows),
        MAX_ERROR_SHARE,
        f"requests of the saturation probe failed: {commonest_errors(wrong)}",
    )


def _cut_off(probes: Sequence[Probe]) -> ValidityCheck | None:
    """Only probes that ran their full length: a hopeless one is expected to leave some behind."""
    shares = [
        sum(row.cut_off for row in probe.requests) / len(probe.requests)
        for probe in probes
        if not probe.ended_early
    ]
    if not shares:
        return None
    return _row("cut_off_share", max(shares), 0.25, "answers had not ended long after the last request")


def _little(probes: Sequence[Probe]) -> ValidityCheck | None:
    """Requests in flight as counted, against rate times mean stay as recorded: a lost record or a bad clock
    shows."""
    worst: tuple[float, float] | None = None
    for probe in probes:
        error = little_error(probe)
        if error is not None and (worst is None or error > worst[0]):
            worst = (error, MAX_LITTLE_ERROR)
    if worst is None:
        return None
    return _row("littles_law", worst[0], worst[1], "requests in flight do not match rate times time")


def little_error(probe: Probe) -> float | None:
    """|N - λR| / N over the measured window; None without counts, or with so few that they say nothing.

    λR is what the records' stays add up to within the window, so that its edges are exact.
    """
    begin, end = probe.warm_cut_s, probe.end_s
    counts = np.array([count for at_s, count in probe.in_flight if begin <= at_s < end], dtype=float)
    if len(counts) < 20 or end <= begin:
        return None
    stay_s = 0.0
    for row in probe.requests:
        sent_s = row.due_s if row.sent_s is None else row.sent_s
        last_s = end if row.end_s is None else row.end_s
        stay_s += max(0.0, min(last_s, end) - max(sent_s, begin))
    mean_count = float(counts.mean())
    if mean_count < 0.5:
        return None
    error = abs(mean_count - stay_s / (end - begin)) / mean_count
    # Counting now and then is itself not exact, above all with few in flight.
    noise = 2.5 * float(np.abs(np.diff(counts)).mean()) / math.sqrt(len(counts)) / mean_count
    return max(0.0, error - noise)


def counter_increase(samples: Sequence[ServerSample], name: str) -> float | None:
    """Of a server's counter within a probe; None if it is not told, or the server began anew meanwhile."""
    values = [getattr(sample, name) for sample in samples if getattr(sample, name) is not None]
    if len(values) < 2 or values[-1] < values[0]:
        return None
    return float(values[-1] - values[0])


def _cache_hits(probes: Sequence[Probe], declared: float) -> ValidityCheck | None:
    worst: float | None = None
    for probe in probes:
        queries = counter_increase(probe.samples, "prefix_queries")
        hits = counter_increase(probe.samples, "prefix_hits")
        if not queries or hits is None:
            continue
        drift = abs(hits / queries - declared)
        worst = drift if worst is None else max(worst, drift)
    if worst is None:
        return None
    return _row(
        "cache_hit_drift",
        worst,
        MAX_HIT_DRIFT,
        f"the share of prompt tokens found in the server's prefix cache is not the declared {declared:.2g}",
    )


def _throttling(probes: Sequence[Probe]) -> ValidityCheck | None:
    refused = [
        increase for probe in probes if (increase := counter_increase(probe.samples, "throttled")) is not None
    ]
    if not refused:
        return None
    return _row(
        "throttled", sum(refused), 0.0, "the server refused requests because of a limit, not of its load"
    )


def _token_counts(probes: Sequence[Probe], tiers: Sequence[SloTier]) -> ValidityCheck | None:
    """Without token counts there is no TPOT, and what is not measured must not pass."""
    if not any(tier.tpot_s is not None for tier in tiers):
        return None
    requests = [requests_of(probe.requests) for probe in probes if probe.requests]
    ended = sum(int((~one.failed & ~one.cut_off).sum()) for one in requests)
    unknown = sum(
        int((~one.failed & ~one.cut_off & np.isnan(one.num_output_tokens)).sum()) for one in requests
    )
    if not ended:
        return None
    return _row(
        "unknown_token_counts", unknown / ended, 0.01, "the server tells no usage, so TPOT is unknown"
    )


def _row(check: str, value: float, limit: float, reason: str) -> ValidityCheck:
    passed = value <= limit
    return ValidityCheck(
        check=check, passed=passed, value=value, limit=limit, reason="" if passed else reason
    )
