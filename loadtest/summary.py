"""The figures of one run, with the definitions of `vllm bench serve` where it has them.

Of the successful requests, in seconds:

    request_throughput      completed / duration          (duration: start to last answer, drain included)
    output_throughput       output tokens / duration
    total_token_throughput  (input + output tokens) / duration
    request_goodput         requests within every limit of --goodput / duration
    ttft, tpot, itl, e2el   see `RequestRecord`; itl pools the chunk gaps of all requests
    client_queue_time       sent - due; e2el_including_client_queue adds it to e2el

Of all requests, failures being infinite: ttft_due, e2el_due. Token counts come from `usage`; where a
successful answer had none, every figure that needs it is None.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.arrivals import NANOSECONDS_PER_SECOND
from loadtest.distribution import Distribution, describe
from loadtest.generator import LoadRun
from loadtest.options import METRIC_NAMES
from loadtest.request_record import RequestRecord

NANOSECONDS_PER_MILLISECOND = 1_000_000
STANDARD_PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Summary:
    duration_s: float
    completed: int
    failed: int
    failures: Mapping[str, int]  # kind -> how many
    total_input_tokens: int | None
    total_output_tokens: int | None
    total_cached_tokens: int | None  # of the input, found in the server's prefix cache; None: not told
    request_throughput: float
    request_goodput: float | None  # None: no limits asked for, or not decidable
    output_throughput: float | None
    total_token_throughput: float | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    tokens_per_chunk: float | None
    delivered_request_rate: float | None  # as sent; None below two requests
    mean_concurrency: float  # by Little's law: time in flight, summed over all requests / duration
    num_other_lengths: int  # answers that are not as long as asked
    num_odd_usages: int  # usage above what was asked for, or below the chunks with content
    num_new_connections: int
    metrics_ms: Mapping[str, Distribution | None]  # vLLM's six
    ttft_content_ms: Distribution | None
    ttft_output_ms: Distribution | None
    ttft_due_ms: Distribution | None
    e2el_due_ms: Distribution | None
    dispatch_lag_ms: Distribution | None
    connect_ms: Distribution | None
    chunk_tokens: Distribution | None  # where the server tells them
    by_tenant: Mapping[str, TenantSummary]


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """What one of several tenants got."""

    attempted: int
    failed: int
    total_output_tokens: int | None
    ttft_due_ms: Distribution | None
    tpot_ms: Distribution | None
    e2el_due_ms: Distribution | None


def summarise(
    run: LoadRun, percentiles: Iterable[float] = (), goodput_ms: Mapping[str, float] | None = None
) -> Summary:
    shares = sorted({*STANDARD_PERCENTILES, *percentiles})
    good = [record for record in run.records if record.succeeded]
    failures: Counter[str] = Counter(record.failure for record in run.records if record.failure is not None)
    input_tokens = total(record.num_prompt_tokens for record in good)
    output_tokens = total(record.num_output_tokens for record in good)
    all_tokens = None if input_tokens is None or output_tokens is None else input_tokens + output_tokens
    num_within = _num_within(good, goodput_ms) if goodput_ms else None

    def describe_ms(values_ns: Iterable[float | None]) -> Distribution | None:
        known = (value / NANOSECONDS_PER_MILLISECOND for value in values_ns if value is not None)
        return describe(known, shares)

    def of_tenant(tenant: str) -> TenantSummary:
        records = [record for record in run.records if record.tenant == tenant]
        return TenantSummary(
            attempted=len(records),
            failed=sum(not record.succeeded for record in records),
            total_output_tokens=total(record.num_output_tokens for record in records if record.succeeded),
            ttft_due_ms=describe_ms(_or_infinite(record.ttft_due_ns) for record in records),
            tpot_ms=describe_ms(record.tpot_ns for record in records if record.succeeded),
            e2el_due_ms=describe_ms(_or_infinite(record.e2el_due_ns) for record in records),
        )

    tenants = sorted({record.tenant for record in run.records})

    def per_second(amount: int | None) -> float | None:
        return None if amount is None else amount / run.duration_s

    return Summary(
        duration_s=run.duration_s,
        completed=len(good),
        failed=len(run.records) - len(good),
        failures=failures,
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        total_cached_tokens=total(record.num_cached_tokens for record in good) if good else None,
        request_throughput=len(good) / run.duration_s,
        request_goodput=per_second(num_within),
        output_throughput=per_second(output_tokens),
        total_token_throughput=per_second(all_tokens),
        max_output_tokens_per_s=peak_tokens_per_s(good),
        max_concurrent_requests=peak_concurrency(good),
        tokens_per_chunk=_tokens_per_chunk(good),
        delivered_request_rate=_delivered_rate(run.records),
        metrics_ms={name: describe_ms(_values_ns(name, good)) for name in METRIC_NAMES},
        mean_concurrency=_mean_concurrency(run),
        num_other_lengths=sum(_has_other_length(record) for record in good),
        num_odd_usages=sum(_has_odd_usage(record) for record in good),
        num_new_connections=sum(record.connect_ns is not None for record in run.records),
        ttft_content_ms=describe_ms(record.ttft_content_ns for record in good),
        ttft_output_ms=describe_ms(record.ttft_output_ns for record in good),
        ttft_due_ms=describe_ms(_or_infinite(record.ttft_due_ns) for record in run.records),
        e2el_due_ms=describe_ms(_or_infinite(record.e2el_due_ns) for record in run.records),
        dispatch_lag_ms=describe_ms(record.dispatch_lag_ns for record in run.records),
        connect_ms=describe_ms(record.connect_ns for record in run.records),
        chunk_tokens=describe((count for record in good for count in record.chunk_tokens), shares),
        by_tenant={tenant: of_tenant(tenant) for tenant in tenants} if tenants != [""] else {},
    )


def total(counts: Iterable[int | None]) -> int | None:
    """The sum; None as soon as one count is unknown."""
    known = 0
    for count in counts:
        if count is None:
            return None
        known += count
    return known


def peak_tokens_per_s(records: Sequence[RequestRecord]) -> float:
    """Most tokens in one of the seconds since the first request, from its time of sending.

    Chunks weigh what the server has told of each, else as many tokens as the request has per chunk on
    average (vLLM counts chunks, which is the same where each holds one token). Without usage a chunk
    counts as one.
    """
    if not records:
        return 0.0
    t_first_ns = min(_sent_ns(record) for record in records)
    tokens_in_second: defaultdict[int, float] = defaultdict(float)
    for record in records:
        weight = (record.num_output_tokens or len(record.chunk_times_ns)) / len(record.chunk_times_ns)
        weights: Iterable[float] = itertools.repeat(weight)
        if len(record.chunk_tokens) == len(record.chunk_times_ns):
            weights = record.chunk_tokens
        for t_chunk_ns, tokens in zip(record.chunk_times_ns, weights, strict=False):
            tokens_in_second[(t_chunk_ns - t_first_ns) // NANOSECONDS_PER_SECOND] += tokens
    return max(tokens_in_second.values())


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests at one instant, each from sending to its last chunk, the end not included."""
    changes: list[tuple[int, int]] = []
    for record in records:
        changes += [(_sent_ns(record), 1), (record.chunk_times_ns[-1], -1)]
    running = peak = 0
    for _, change in sorted(changes):  # at one instant, ends (-1) come before starts
        running += change
        peak = max(peak, running)
    return peak


def _values_ns(metric: str, good: Sequence[RequestRecord]) -> Iterable[float | None]:
    match metric:
        case "ttft":
            return (record.ttft_ns for record in good)
        case "tpot":
            return (record.tpot_ns for record in good)
        case "itl":
            return (gap for record in good for gap in record.itls_ns)
        case "e2el":
            return (record.e2el_ns for record in good)
        case "client_queue_time":
            return (record.dispatch_lag_ns for record in good)
        case "e2el_including_client_queue":
            return (record.chunk_times_ns[-1] - record.t_due_ns for record in good)
    raise ValueError(f"no metric {metric!r}; there are: {', '.join(METRIC_NAMES)}")


def _num_within(good: Sequence[RequestRecord], limits_ms: Mapping[str, float]) -> int | None:
    """Requests that keep every limit. A one-token answer has no TPOT to break one, as in vLLM.

    None if TPOT is limited and a token count is unknown.
    """
    if "tpot" in limits_ms and any(record.num_output_tokens is None for record in good):
        return None

    def keeps(record: RequestRecord) -> bool:
        values_ns = {"ttft": record.ttft_ns, "tpot": record.tpot_ns, "e2el": record.e2el_ns}
        return all(
            (values_ns[name] or 0) <= limit_ms * NANOSECONDS_PER_MILLISECOND
            for name, limit_ms in limits_ms.items()
        )

    return sum(keeps(record) for record in good)


def _tokens_per_chunk(good: Sequence[RequestRecord]) -> float | None:
    tokens = total(record.num_output_tokens for record in good)
    chunks = sum(len(record.chunk_times_ns) for record in good)
    return None if tokens is None or chunks == 0 else tokens / chunks


def _mean_concurrency(run: LoadRun) -> float:
    in_flight_ns = sum(
        record.t_end_ns - record.t_sent_ns
        for record in run.records
        if record.t_end_ns is not None and record.t_sent_ns is not None
    )
    return in_flight_ns / NANOSECONDS_PER_SECOND / run.duration_s


def _has_other_length(record: RequestRecord) -> bool:
    num_tokens = record.num_output_tokens
    return num_tokens is not None and num_tokens != record.num_output_tokens_asked


def _has_odd_usage(record: RequestRecord) -> bool:
    """A token is in one chunk, and no server gives more of them than it may."""
    num_tokens = record.num_output_tokens
    if num_tokens is None:
        return False
    return num_tokens > record.num_output_tokens_asked or num_tokens < record.num_content_chunks


def _delivered_rate(records: Sequence[RequestRecord]) -> float | None:
    """Requests per second between the first and the last sending."""
    sent_ns = sorted(record.t_sent_ns for record in records if record.t_sent_ns is not None)
    if len(sent_ns) < 2 or sent_ns[-1] == sent_ns[0]:
        return None
    return (len(sent_ns) - 1) / (sent_ns[-1] - sent_ns[0]) * NANOSECONDS_PER_SECOND


def _or_infinite(value_ns: int | None) -> float:
    return math.inf if value_ns is None else value_ns


def _sent_ns(record: RequestRecord) -> int:
    assert record.t_sent_ns is not None, "a successful request was sent"
    return record.t_sent_ns
