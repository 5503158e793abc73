"""A knee search over HTTP: a real gateway, and simulated engines whose speed is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loadtest.client import Target
from loadtest.knee.live_prober import LiveProber, LiveTarget
from loadtest.knee.options import KneeOptions
from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.knee.prober import ClosedLoopPlan, OpenLoopPlan
from loadtest.knee.result import read_result
from loadtest.knee.run import run_knee
from loadtest.knee.slo import SloTier
from loadtest.knee.validity import little_error
from loadtest.options import BenchServeOptions
from tests.stack import Stack

STEP_S = 0.02
MAX_NUM_SEQS = 8
OUTPUT_TOKENS = 10


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    knobs = f"step_base_ms={1000 * STEP_S:g},step_per_sequence_ms=0,step_per_prefill_token_ms=0"
    models = [{"name": "known", "source": f"sim:{knobs}", "max_num_seqs": MAX_NUM_SEQS}]
    with Stack(redis_url, {"models": models}) as stack:
        yield stack


@pytest.fixture
def options(stack: Stack) -> BenchServeOptions:
    return BenchServeOptions(
        base_url=stack.url,
        model="known",
        api_key=stack.key(),
        random_input_len=20,
        random_output_len=OUTPUT_TOKENS,
    )


def live(options: BenchServeOptions) -> LiveProber:
    target = Target(
        options.url,
        "openai",
        "known",
        headers={"Authorization": f"Bearer {options.api_key}"},
        ignore_eos=True,
        keeps_text=False,
    )
    return LiveProber(LiveTarget(options, target, nonce=3))


def test_an_open_loop_probe_sees_what_the_engine_does(options: BenchServeOptions) -> None:
    async def probe() -> tuple[Probe, list[str]]:
        async with live(options) as prober:
            seen = await prober.open_loop(OpenLoopPlan(10.0, 1.0, 2.0, warm_cut_s=0.5, drain_limit_s=5.0))
            return seen, prober.not_reported

    seen, not_reported = asyncio.run(probe())
    assert 5 <= len(seen.requests) <= 40  # 20 are expected
    assert not any(row.failed or row.cut_off for row in seen.requests)
    assert all(row.trace_id and row.num_output_tokens == OUTPUT_TOKENS for row in seen.requests)
    tpots = [row.tpot for row in seen.requests if row.tpot is not None]
    assert float(np.median(tpots)) == pytest.approx(STEP_S, rel=0.35)
    assert all(row.due_s <= (row.sent_s or 0.0) < (row.first_token_s or 0.0) for row in seen.requests)
    error = little_error(seen)
    assert error is None or error < 0.25
    assert any(sample.running for sample in seen.samples)
    assert "running" not in not_reported


def test_a_hopeless_probe_is_ended_and_its_requests_are_cut_off(options: BenchServeOptions) -> None:
    async def probe() -> Probe:
        async with live(options) as prober:
            return await prober.open_loop(
                OpenLoopPlan(200.0, 1.0, 30.0, 0.0, 5.0, early_end=lambda rows, at_s: len(rows) > 20)
            )

    seen = asyncio.run(probe())
    assert seen.ended_early
    assert seen.end_s < 10
    cut_off = [row for row in seen.requests if row.cut_off]
    assert cut_off
    assert all(row.num_output_tokens == OUTPUT_TOKENS for row in cut_off)  # they would have been as long
    assert all(row.due_s <= seen.drained_s for row in seen.requests)


def test_a_closed_loop_grows_on_demand_and_stops_when_told(options: BenchServeOptions) -> None:
    def grow(rows: list[ProbedRequest], at_s: float) -> int | None:
        return 6 if len(rows) < 30 else None

    async def probe() -> tuple[Probe, Probe]:
        async with live(options) as prober:
            single = await prober.closed_loop(ClosedLoopPlan(1, 20.0, 5.0, kind="unloaded", max_requests=3))
            return single, await prober.closed_loop(
                ClosedLoopPlan(2, 20.0, 0.0, next_concurrency=grow)  # type: ignore[arg-type]
            )

    single, grown = asyncio.run(probe())
    assert [row.end_s is not None and not row.failed for row in single.requests] == [True] * 3
    assert all(
        later.due_s >= (earlier.end_s or 0.0)
        for earlier, later in zip(single.requests, single.requests[1:], strict=False)
    )
    assert grown.concurrency == 6
    assert grown.end_s < 15
    assert max(count for _, count in grown.in_flight) == 6


def test_a_server_without_an_api_key_for_us_is_told_in_one_go(
    options: BenchServeOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = BenchServeOptions(base_url=options.base_url, model="known", api_key="hr-wrong")
    search = KneeOptions(
        wrong, (SloTier(ttft_s=1.0),), budget_s=20.0, json_file=tmp_path / "knee.json", shows_progress=False
    )
    assert run_knee(search) == 5
    result = read_result(tmp_path / "knee.json")
    assert result.status == "invalid"
    assert "401" in result.reasons[0]
    assert result.seconds_spent < 10
    assert "every request failed" in capsys.readouterr().out


@pytest.mark.soak
def test_a_live_search_finds_the_knee_of_a_known_engine(options: BenchServeOptions, tmp_path: Path) -> None:
    """Eight slots, 20 ms a step, ten steps a request: 40 requests/s at most."""
    search = KneeOptions(
        options,
        (SloTier(ttft_s=0.3),),
        budget_s=60.0,
        json_file=tmp_path / "knee.json",
        shows_progress=False,
    )
    code = run_knee(search)
    result = read_result(tmp_path / "knee.json")
    assert code == 0, result.reasons
    assert result.saturation_rate == pytest.approx(40, rel=0.1)
    assert result.slo_capacity is not None
    assert 0.75 < result.slo_capacity.rate / 40 < 1.0
    assert result.seconds_spent <= 60 + max(probe.drained_s for probe in result.probes)
