"""Verdicts on the generator itself, over records and samples made by hand."""

from __future__ import annotations

import time

import pytest

from loadtest.client_check import (
    HELD_BACK,
    check_client,
    client_bound_reasons,
    is_client_bound,
    other_broken_reasons,
)
from loadtest.datasets.prompt import Prompt
from loadtest.generator import OpenLoop, generate_load
from loadtest.generator_samples import CollectorPause, GeneratorSamples
from loadtest.request_record import RequestRecord
from loadtest.validity import ValidityCheck

MS = 1_000_000
FINE = GeneratorSamples(loop_lags_ns=[MS] * 100, cpu_s=1.0, wall_s=10.0)


def records_with(
    num_requests: int = 200, *, lag_ms: float = 0.5, slot_wait_ms: float = 0.0, connect_ms: float = 0.0
) -> list[RequestRecord]:
    """One due each 10 ms."""
    made = []
    for index in range(num_requests):
        due = index * 10 * MS
        dispatch = due + int(lag_ms * MS)
        ready = dispatch + int(slot_wait_ms * MS)
        record = RequestRecord(index, 4, due, t_dispatch_ns=dispatch, t_ready_ns=ready)
        record.connect_ns = int(connect_ms * MS) or None
        record.t_sent_ns = ready + int(connect_ms * MS)
        made.append(record)
    return made


def failed(checks: list[ValidityCheck]) -> list[str]:
    return [check.check for check in checks if not check.passed]


def test_generator_that_keeps_up_passes_everything() -> None:
    checks = check_client(records_with(), [FINE])
    assert failed(checks) == []
    assert not is_client_bound(checks)
    assert {check.check for check in checks} >= {"dispatch_lag_p99_ms", "loop_lag_p99_ms", "cpu_share"}


def test_late_sending_is_client_bound_and_the_reason_says_by_how_much() -> None:
    checks = check_client(records_with(lag_ms=12.5), [FINE])
    assert failed(checks) == ["dispatch_lag_p99_ms"]
    assert is_client_bound(checks)
    assert "12.50 ms" in client_bound_reasons(checks)[0]


def test_waits_for_a_slot_and_for_a_connection_are_not_the_generators_fault() -> None:
    checks = check_client(records_with(slot_wait_ms=500, connect_ms=80), [FINE])
    assert failed(checks) == [HELD_BACK]
    assert not is_client_bound(checks)


def test_rate_that_was_not_delivered_is_client_bound() -> None:
    records = records_with(500)
    for record in records:  # each a little later than the last
        record.t_dispatch_ns = record.t_due_ns + record.index * MS
        record.t_ready_ns = record.t_sent_ns = record.t_dispatch_ns
    checks = check_client(records, [FINE])
    assert "delivered_rate_error" in failed(checks)
    assert any(
        "asked for 100.0 requests/s, dispatched 90.9" in reason for reason in client_bound_reasons(checks)
    )


@pytest.mark.parametrize(
    ("samples", "check"),
    [
        (GeneratorSamples(loop_lags_ns=[MS] * 90 + [40 * MS] * 10, cpu_s=1, wall_s=10), "loop_lag_p99_ms"),
        (GeneratorSamples(loop_lags_ns=[MS] * 99, cpu_s=9.5, wall_s=10), "cpu_share"),
        (
            GeneratorSamples(collector_pauses=[CollectorPause(0, 25 * MS)], cpu_s=1, wall_s=10),
            "collector_pause_ms",
        ),
    ],
)
def test_one_process_in_trouble_is_enough(samples: GeneratorSamples, check: str) -> None:
    assert failed(check_client(records_with(), [FINE, samples])) == [check]
    assert is_client_bound(check_client(records_with(), [FINE, samples], is_open_loop=False))


def test_sockets_that_ran_out_here_are_no_failure_of_the_server() -> None:
    records = records_with()
    records[3].failure, records[3].error = "client", "OSError: Too many open files"
    checks = check_client(records, [FINE])
    assert failed(checks) == ["client_failures"]
    assert "Too many open files" in client_bound_reasons(checks)[0]


def test_server_that_differs_from_what_was_declared_is_not_client_bound() -> None:
    unlike = ValidityCheck(check="prefix_hit_share", passed=False, value=0.9, limit=0.1, reason="other hits")
    checks = [*check_client(records_with(), [FINE]), unlike]
    assert not is_client_bound(checks)
    assert other_broken_reasons(checks) == ["other hits"]


def test_processor_time_of_a_few_milliseconds_is_no_share() -> None:
    checks = check_client(records_with(), [GeneratorSamples(cpu_s=0.006, wall_s=0.006)])
    assert not is_client_bound(checks)
    told = next(check for check in checks if check.check == "cpu_share")
    assert (told.value, told.reason) == (None, "the run was too short to sample it")


async def test_generator_without_processor_time_says_so() -> None:
    """Each request costs 4 ms of computing, and one is due each millisecond."""

    async def send(prompt: Prompt, record: RequestRecord) -> None:
        record.t_sent_ns = time.monotonic_ns()
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass

    prompts = [Prompt([1000], 1)] * 100
    run = await generate_load(prompts, OpenLoop([index * MS for index in range(100)]), send)
    checks = check_client(run.records, run.generator)
    assert is_client_bound(checks)
    assert "dispatch_lag_p99_ms" in failed(checks)
    assert run.generator[0].loop_lags_ns  # sampled in the event loop that was starved
