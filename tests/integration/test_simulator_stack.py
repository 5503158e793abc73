"""Simulated engines behind a real gateway, measured by the load generator: what is planted is seen."""

from __future__ import annotations

import asyncio
import re
import signal
import statistics
from collections.abc import Iterator, Sequence

import pytest

from loadtest.client import OpenAIClient, Target
from loadtest.datasets.prompt import Prompt
from loadtest.generator import ClosedLoop, LoadRun, OpenLoop, Schedule, generate_load
from loadtest.request_record import RequestRecord
from tests.stack import Stack, wait_until

QUICK = "step_base_ms=2,step_per_sequence_ms=0,step_per_prefill_token_ms=0"
STEADY = "step_base_ms=20,step_per_sequence_ms=0,step_per_prefill_token_ms=0"
MODELS = {
    "steady": f"{STEADY},ttft_floor_ms=150",
    "chunky": f"{STEADY},tokens_per_message=4",
    "stalling": f"{QUICK},stall_s=2,stall_after_requests=20",
    "failing": f"{STEADY},reject_share=0.1,abort_share=0.2",
    "cached": f"{QUICK},prefix_hit_share=0.4,undeclared_hit_points=20",
}
NS_PER_S = 1e9


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    models = [{"name": name, "source": f"sim:{knobs}"} for name, knobs in MODELS.items()]
    with Stack(redis_url, {"models": [*models, {"name": "joined", "source": "sim:", "engines": 0}]}) as stack:
        run(stack, "steady", 2, 3, ClosedLoop(1))  # the first ones wait for what a gateway loads for them
        yield stack


def run(stack: Stack, model: str, num_requests: int, num_output_tokens: int, schedule: Schedule) -> LoadRun:
    target = Target(
        f"{stack.url}/v1/chat/completions",
        "openai-chat",
        model,
        headers={"Authorization": f"Bearer {stack.key()}"},
        ignore_eos=True,
    )
    prompts = [Prompt(f"{number:04d} " + "x" * 95, num_output_tokens) for number in range(num_requests)]

    async def measured() -> LoadRun:
        async with OpenAIClient(target) as client:
            return await generate_load(prompts, schedule, client.send)

    return asyncio.run(measured())


def every(interval_s: float, num_requests: int) -> list[int]:
    return [round(number * interval_s * NS_PER_S) for number in range(num_requests)]


def seconds(values: Sequence[float | None]) -> list[float]:
    assert None not in values
    return sorted(value / NS_PER_S for value in values if value is not None)


def counters(stack: Stack, model: str) -> dict[str, float]:
    """Of one model, by name."""
    status, body = stack.get("/metrics")
    assert status == 200
    pattern = re.compile(rf'^(vllm:\w+)\{{[^}}]*model_name="{model}"[^}}]*\}} (\S+)$', re.MULTILINE)
    return {name: float(value) for name, value in pattern.findall(body.decode())}


def best_tpot_s(records: Sequence[RequestRecord]) -> float:
    """The one nearest to 20 ms: a busy machine blurs some, in both directions, and a wrong formula all."""
    return min(seconds([record.tpot_ns for record in records]), key=lambda tpot_s: abs(tpot_s - 0.020))


def test_the_planted_floor_and_step_are_what_a_client_measures(stack: Stack) -> None:
    records = run(stack, "steady", 6, 21, ClosedLoop(3)).records
    assert [record.failure for record in records] == [None] * 6
    assert {record.num_output_tokens for record in records} == {21}
    ttfts_s = seconds([record.ttft_content_ns for record in records])
    assert ttfts_s[0] >= 0.17, "the floor and a step"
    assert ttfts_s[0] < 0.6
    assert best_tpot_s(records) == pytest.approx(0.020, rel=0.05)


def test_four_tokens_in_a_message_are_one_chunk_and_leave_the_time_per_token_as_it_is(stack: Stack) -> None:
    records = run(stack, "chunky", 6, 17, ClosedLoop(2)).records
    assert [record.failure for record in records] == [None] * 6
    assert {record.num_output_tokens for record in records} == {17}
    # The first token, and four times four; fewer where a busy gateway has merged two.
    assert max(record.num_content_chunks for record in records) == 5
    gaps_s = [gap_s for record in records for gap_s in seconds(record.itls_ns) if gap_s > 0.005]
    assert statistics.median(gaps_s) == pytest.approx(0.080, rel=0.1), "between chunks lie four steps"
    assert best_tpot_s(records) == pytest.approx(0.020, rel=0.02)


def test_a_stall_shows_in_latencies_from_due_and_hides_from_those_that_are_sent_late(stack: Stack) -> None:
    """Coordinated omission: with eight in flight, only eight requests see the stall by themselves."""
    schedule = OpenLoop(every(0.02, 100), max_concurrency=8)
    records = run(stack, "stalling", 100, 3, schedule).records
    assert [record.failure for record in records] == [None] * 100
    from_due_s = seconds([record.ttft_due_ns for record in records])
    from_sent_s = seconds([record.ttft_content_ns for record in records])
    assert from_due_s[98] >= 1.8, "the 99th percentile"
    assert len([ttft_s for ttft_s in from_sent_s if ttft_s > 1]) <= 8
    assert len([ttft_s for ttft_s in from_due_s if ttft_s > 1]) >= 40
    assert seconds([record.dispatch_lag_ns for record in records])[-1] > 1.5
    wait_until(lambda: set(stack.gauges().values()) == {0}, what="an idle stack")


def test_refused_and_aborted_requests_are_failures_in_the_shares_that_were_planted(stack: Stack) -> None:
    records = run(stack, "failing", 40, 16, ClosedLoop(20)).records
    failed = [record for record in records if not record.succeeded]
    refused = [record for record in failed if record.http_status in (429, 503)]
    cut = [record for record in failed if record.failure == "error_event"]
    assert (len(failed), len(refused)) == (12, 4)
    # All eight, but for one whose eight tokens a busy gateway may have found together with their end.
    assert len(cut) >= 6
    assert all(record.t_first_token_ns is not None and record.http_status == 200 for record in cut)
    assert all(record.ttft_due_ns is None for record in failed)


def test_counters_of_the_prefix_cache_differ_from_what_was_saved_by_the_points_that_were_planted(
    stack: Stack,
) -> None:
    records = run(stack, "cached", 20, 4, ClosedLoop(4)).records
    num_prompt_tokens = sum(record.num_prompt_tokens or 0 for record in records)
    assert num_prompt_tokens > 2000
    cached_share = sum(record.num_cached_tokens or 0 for record in records) / num_prompt_tokens
    assert cached_share == pytest.approx(0.4, abs=0.005)
    told = counters(stack, "cached")
    assert told["vllm:prefix_cache_queries_total"] == num_prompt_tokens
    assert told["vllm:prefix_cache_hits_total"] / num_prompt_tokens == pytest.approx(0.6, abs=0.005)
    assert told["vllm:generation_tokens_total"] == 80


def test_the_command_joins_a_stack_serves_and_leaves_it(stack: Stack) -> None:
    process = stack._start(
        "simulator",
        "simulator", "step_base_ms=1", "--model", "joined",
        "--bind", f"ipc://{stack.directory}/joined.sock",
    )  # fmt: skip
    stack.wait_linked(len(MODELS) + 1)
    records: list[RequestRecord] = run(stack, "joined", 2, 5, ClosedLoop(1)).records
    assert [record.failure for record in records] == [None, None]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, stack.log("simulator")
    stack.wait_linked(len(MODELS))
    members = stack.redis.smembers(stack.keys.engines)
    assert not [engine_id for engine_id in members if b"joined" in engine_id]
