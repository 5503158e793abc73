"""Figures of hand-made runs, computed by hand."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime

import numpy as np
import pytest

from loadtest.distribution import describe, percentile
from loadtest.generator import LoadRun
from loadtest.request_record import RequestRecord
from loadtest.summary import summarise

MS = 1_000_000
INF = math.inf


def answered(
    index: int,
    *,
    due_ms: int,
    sent_ms: int,
    chunks_ms: list[int],
    output_tokens: int | None,
    content_ms: int | None = None,
    end_ms: int | None = None,
    input_tokens: int = 10,
) -> RequestRecord:
    return RequestRecord(
        index=index,
        num_output_tokens_asked=output_tokens or 1,
        t_due_ns=due_ms * MS,
        num_prompt_tokens=input_tokens,
        num_output_tokens=output_tokens,
        t_sent_ns=sent_ms * MS,
        t_first_token_ns=(chunks_ms[0] if content_ms is None else content_ms) * MS,
        chunk_times_ns=[time * MS for time in chunks_ms],
        t_end_ns=(chunks_ms[-1] if end_ms is None else end_ms) * MS,
        finish_reason="length",
    )


def failed(index: int, *, due_ms: int, sent_ms: int, end_ms: int) -> RequestRecord:
    record = RequestRecord(index, 4, due_ms * MS, t_sent_ns=sent_ms * MS, t_end_ns=end_ms * MS)
    record.failure, record.error = "http_status", "HTTP 503: busy"
    return record


def run_of(*records: RequestRecord, duration_ms: int = 2000) -> LoadRun:
    return LoadRun(list(records), 0, duration_ms * MS, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))


ONE = answered(0, due_ms=0, sent_ms=10, chunks_ms=[110, 160, 210, 260], output_tokens=4, end_ms=270)
TWO = answered(1, due_ms=100, sent_ms=100, chunks_ms=[400, 500], output_tokens=5, input_tokens=20)


def test_latencies_and_throughputs_of_two_requests() -> None:
    summary = summarise(run_of(ONE, TWO))
    metrics = summary.metrics_ms
    assert (metrics["ttft"].mean, metrics["ttft"].median, metrics["ttft"].std) == (200, 200, 100)
    assert metrics["tpot"].mean == pytest.approx((150 / 3 + 100 / 4) / 2)
    assert metrics["itl"].count == 4
    assert metrics["itl"].mean == pytest.approx((50 + 50 + 50 + 100) / 4)
    assert metrics["e2el"].mean == pytest.approx((250 + 400) / 2)
    assert metrics["client_queue_time"].mean == pytest.approx(5)
    assert metrics["e2el_including_client_queue"].mean == pytest.approx((260 + 400) / 2)
    assert summary.request_throughput == 1.0
    assert summary.output_throughput == 4.5
    assert summary.total_token_throughput == (30 + 9) / 2
    assert (summary.total_input_tokens, summary.total_output_tokens) == (30, 9)
    assert summary.tokens_per_chunk == 9 / 6
    assert summary.max_concurrent_requests == 2
    assert summary.max_output_tokens_per_s == pytest.approx(9)


def test_failures_are_counted_and_infinite_from_due_but_not_in_vllm_figures() -> None:
    broken = failed(2, due_ms=200, sent_ms=200, end_ms=201)
    summary = summarise(run_of(ONE, TWO, broken))
    assert (summary.completed, summary.failed, summary.failures) == (2, 1, {"http_status": 1})
    assert summary.metrics_ms["ttft"].count == 2
    assert summary.ttft_due_ms.count == 3
    assert summary.ttft_due_ms.percentiles[50.0] == 300  # of 110, 300, inf
    assert summary.ttft_due_ms.percentiles[99.0] == INF
    assert summary.e2el_due_ms.mean == INF
    assert summary.dispatch_lag_ms.count == 3


def test_role_delta_is_vllms_first_token_but_not_the_first_content() -> None:
    record = answered(0, due_ms=0, sent_ms=5, chunks_ms=[15, 205, 215], output_tokens=2, content_ms=205)
    summary = summarise(run_of(record))
    assert summary.metrics_ms["ttft"].mean == 10
    assert summary.ttft_content_ms.mean == 200
    assert summary.ttft_due_ms.mean == 205


def test_one_token_answer_has_no_tpot_and_passes_the_limit_on_it() -> None:
    record = answered(0, due_ms=0, sent_ms=0, chunks_ms=[30], output_tokens=1)
    summary = summarise(run_of(record), goodput_ms={"tpot": 1, "ttft": 30})
    assert summary.metrics_ms["tpot"] is None
    assert summary.request_goodput == 0.5


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    broken = failed(2, due_ms=0, sent_ms=0, end_ms=1)
    run = run_of(ONE, TWO, broken)
    assert summarise(run, goodput_ms={"ttft": 300, "tpot": 50}).request_goodput == 1.0
    assert summarise(run, goodput_ms={"ttft": 299, "tpot": 50}).request_goodput == 0.5
    assert summarise(run, goodput_ms={"e2el": 249}).request_goodput == 0.0
    assert summarise(run).request_goodput is None


def test_without_usage_token_figures_are_unknown_and_not_guessed() -> None:
    silent = answered(0, due_ms=0, sent_ms=0, chunks_ms=[30, 40], output_tokens=None)
    summary = summarise(run_of(silent, TWO), goodput_ms={"tpot": 1000})
    assert summary.total_output_tokens is None
    assert summary.output_throughput is None
    assert summary.total_token_throughput is None
    assert summary.request_goodput is None
    assert summary.metrics_ms["ttft"].count == 2


def test_a_run_of_failures_only_has_no_latencies_and_no_throughput() -> None:
    summary = summarise(run_of(failed(0, due_ms=0, sent_ms=1, end_ms=2)))
    assert set(summary.metrics_ms.values()) == {None}
    assert (summary.completed, summary.request_throughput, summary.max_concurrent_requests) == (0, 0.0, 0)
    assert summary.ttft_due_ms.median == INF


def test_request_that_ends_when_the_next_begins_does_not_overlap_it() -> None:
    first = answered(0, due_ms=0, sent_ms=0, chunks_ms=[50], output_tokens=1)
    second = answered(1, due_ms=50, sent_ms=50, chunks_ms=[90], output_tokens=1)
    assert summarise(run_of(first, second)).max_concurrent_requests == 1


def test_delivered_rate_is_that_of_the_sending() -> None:
    records = [
        answered(i, due_ms=0, sent_ms=250 * i, chunks_ms=[250 * i + 5], output_tokens=1) for i in range(5)
    ]
    assert summarise(run_of(*records)).delivered_request_rate == 4.0


def test_percentiles_equal_numpys_and_stay_infinite_instead_of_not_a_number() -> None:
    rng = random.Random(4)
    values = sorted(rng.random() for _ in range(101))
    for share in (0, 1, 37.5, 50, 99, 99.9, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share))
    assert percentile([1.0, INF, INF], 75) == INF
    assert percentile([1.0, 2.0, INF], 50) == 2.0
    assert percentile([1.0, 2.0, INF], 60) == INF
    assert describe([], [50]) is None
