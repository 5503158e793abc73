"""The parts of a knee search, each against data in which the answer was planted."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from loadtest.knee.arrival_law import draw_gaps
from loadtest.knee.batch_recursion import simulate_batches
from loadtest.knee.bootstrap import block_weights, design_effect, interval
from loadtest.knee.fit import fit_plain, logistic, logit
from loadtest.knee.growth import Growth
from loadtest.knee.guards import (
    ProbeAtEstimate,
    bracket,
    is_hopeless,
    twin_is_refuted,
    validation_rates,
)
from loadtest.knee.observations import Blocks, blocks_of
from loadtest.knee.probe import Probe, ProbedRequest, ServerSample
from loadtest.knee.prober import ClientCheck, ClosedLoopPlan, OpenLoopPlan
from loadtest.knee.queue_twin import QueueTwin, WorkWeights, queue_waits
from loadtest.knee.saturation import completion_slope, slots_in_use
from loadtest.knee.seen_lengths import Lengths
from loadtest.knee.shape_knee import shape_knee
from loadtest.knee.simulated_prober import LengthLaw, SimulatedProber
from loadtest.knee.slo import SloTier
from loadtest.knee.steady import is_steady
from loadtest.knee.step_costs import StepCosts, fit_step_costs
from loadtest.knee.twin import fit_twin, twin_data
from loadtest.knee.validity import check_validity, lag_limit_s, late_percentile, little_error
from loadtest.simulator.batching_model import BatchingParameters
from tests.planted_knee import model_latencies

TIER = SloTier(ttft_s=0.5)


def request(due_s: float, ttft_s: float = 0.1, stay_s: float = 1.0, **fields: object) -> ProbedRequest:
    usual = {
        "due_s": due_s,
        "sent_s": due_s,
        "first_token_s": due_s + ttft_s,
        "end_s": due_s + stay_s,
        "num_prompt_tokens": 10,
        "num_output_tokens": 11,
    }
    return ProbedRequest(**{**usual, **fields})  # type: ignore[arg-type]


def probe_of(rows: list[ProbedRequest], end_s: float, **fields: object) -> Probe:
    usual = {"kind": "open_loop", "rate": 10.0, "cv": 1.0, "begin_s": 0.0, "end_s": end_s, "drained_s": end_s}
    return Probe(**{**usual, "requests": rows, **fields})  # type: ignore[arg-type]


# The plain fit and the bootstrap


def planted_blocks(knee: float, num_blocks: int, worth: float, rng: np.random.Generator) -> Blocks:
    """Blocks of 200 requests that are worth `worth` independent ones, near the knee."""
    rates = knee * np.exp(rng.uniform(-0.1, 0.1, num_blocks))
    share = logistic(logit(0.95) - 14 * np.log(rates / knee))
    good = rng.binomial(round(worth), share) / round(worth)
    return Blocks(rates, np.full(num_blocks, 200.0), good)


def test_the_plain_fit_finds_a_planted_knee_and_its_interval_covers_it() -> None:
    errors, covered = [], 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        fit = fit_plain(planted_blocks(12.0, 9, 20, rng), 0.95, 13.0, 0.2, rng)
        low, high = interval(fit.draws)
        errors.append(fit.rate / 12.0 - 1)
        covered += low <= 12.0 <= high
    assert float(np.sqrt(np.mean(np.square(errors)))) < 0.05
    assert covered >= 25  # 27 are expected; 24 or fewer come once in twenty-five times at 90 %


def test_without_blocks_the_fit_is_the_guess_with_its_width() -> None:
    nothing = Blocks(np.empty(0), np.empty(0), np.empty(0))
    fit = fit_plain(nothing, 0.95, 13.0, 0.2, np.random.default_rng(1))
    assert fit.rate == pytest.approx(13.0, rel=0.02)
    assert float(np.log(fit.draws).std()) == pytest.approx(0.2, rel=0.15)


def test_correlated_requests_have_a_design_effect() -> None:
    rng = np.random.default_rng(3)
    expected = np.full(400, 0.9)
    independent = rng.binomial(200, expected) / 200
    in_tens = rng.binomial(20, expected) / 20
    counts = np.full(400, 200.0)
    assert design_effect(independent, counts, expected) == pytest.approx(1.0, abs=0.2)
    assert design_effect(in_tens, counts, expected) == pytest.approx(10.0, rel=0.2)


def test_each_draw_weighs_half_of_the_blocks_twice_as_much() -> None:
    weights = block_weights(8, 300, np.random.default_rng(0))
    assert weights.sum(axis=1) == pytest.approx(8.0)
    assert set(np.unique(weights)) <= {0.0, 2.0, 4.0, 6.0, 8.0}
    assert float(weights.mean(axis=1).var() + weights.mean(axis=0).var()) < 0.1  # none is preferred


# Twins


def test_the_lockstep_recursion_is_the_batching_model_to_the_last_digit() -> None:
    rng = np.random.default_rng(0)
    due_s = np.cumsum(rng.exponential(1 / 16, (2, 400)), axis=1)
    prompts, outputs = LengthLaw().draw((2, 400), rng)
    times = simulate_batches(StepCosts(0.01, 0.00012, 0.00003, 64), due_s, prompts, outputs)
    for run in range(2):
        ttft_s, tpot_s, e2el_s = model_latencies(BatchingParameters(), due_s[run], prompts[run], outputs[run])
        assert times.ttft_s[run] == pytest.approx(ttft_s, abs=1e-9)
        assert times.e2el_s[run] == pytest.approx(e2el_s, abs=1e-9)
        assert times.tpot_s[run] == pytest.approx(tpot_s, abs=1e-9)


def test_runs_of_different_lengths_go_side_by_side() -> None:
    costs = StepCosts(0.01, 0.0, 0.0, 4)
    due_s = np.array([[0.0, 1.0, 2.0], [0.5, np.inf, np.inf]])
    times = simulate_batches(costs, due_s, np.full((2, 3), 5.0), np.full((2, 3), 3.0))
    assert times.ttft_s[0] == pytest.approx([0.01] * 3)
    assert times.e2el_s[1, 0] == pytest.approx(0.03)
    assert np.isnan(times.ttft_s[1, 1:]).all()


def test_waits_follow_the_recursion() -> None:
    rng = np.random.default_rng(2)
    gaps, work = rng.exponential(1.0, 200), rng.exponential(0.9, 200)
    wait, expected = 0.0, []
    for number in range(200):
        if number:
            wait = max(0.0, wait + work[number - 1] - gaps[number])
        expected.append(wait)
    assert queue_waits(gaps, work) == pytest.approx(expected)


def test_the_costs_of_steps_come_back_from_what_clients_saw() -> None:
    planted = BatchingParameters()
    fit = fit_step_costs(simulated_probes(planted), 64)
    assert fit is not None
    assert fit.costs.base_s == pytest.approx(planted.step_base_s, rel=0.05)
    assert fit.costs.per_sequence_s == pytest.approx(planted.step_per_sequence_s, rel=0.15)
    assert fit.costs.per_prefill_token_s == pytest.approx(planted.step_per_prefill_token_s, rel=0.2)
    assert fit.misfit < 0.01


def test_a_cost_that_is_no_sum_of_batch_and_prompts_is_noticed() -> None:
    fit = fit_step_costs(simulated_probes(BatchingParameters(decode_slowdown_per_prefill_token=0.01)), 64)
    assert fit is not None
    assert not fit.has_right_form


def simulated_probes(parameters: BatchingParameters) -> list[Probe]:
    prober = SimulatedProber(parameters, seed=5)

    async def probe() -> list[Probe]:
        return [
            await prober.closed_loop(ClosedLoopPlan(1, 30, 5, kind="unloaded", max_requests=8)),
            await prober.closed_loop(ClosedLoopPlan(96, 25, 0, kind="saturation")),
            await prober.open_loop(OpenLoopPlan(8.0, 1.0, 25, 5, 10)),
        ]

    return asyncio.run(probe())


def test_a_twin_takes_the_luck_of_the_arrivals_out_of_the_estimate() -> None:
    """A real queue, with the promise to wait at most 1 s; the twin knows neither that limit nor the noise."""
    capacity, limit_s, rng = 10.0, 1.0, np.random.default_rng(11)
    lengths = Lengths(np.ones(1), np.ones(1))  # each request is the same work
    truth = deterministic_queue_knee(capacity, limit_s)
    twin = QueueTwin(capacity, WorkWeights(0.0, 1.0), 1.0, threshold_guess=1.6, threshold_log_sd=0.5)
    plain_errors, twin_errors = [], []
    for seed in range(6):
        probes = [queue_probe(capacity, limit_s, truth * factor, rng) for factor in (0.97, 1.0, 1.02)]
        blocks = blocks_of(probes, TIER)
        plain = fit_plain(blocks, 0.95, 0.9 * capacity, 0.2, np.random.default_rng(seed))
        data = twin_data(probes, TIER, blocks, lengths)
        good = [np.array([row.ttft_due <= 0.5 for row in probe.requests], dtype=float) for probe in probes]
        fit = fit_twin(twin, data, good, plain.rate, seed, np.random.default_rng(seed))
        assert fit is not None
        assert fit.correlation > 0.9
        assert fit.threshold == pytest.approx(limit_s, rel=0.25)
        plain_errors.append(plain.rate / truth - 1)
        twin_errors.append(fit.rate / truth - 1)
    assert np.sqrt(np.mean(np.square(twin_errors))) < 0.03
    assert np.sqrt(np.mean(np.square(twin_errors))) < 0.7 * np.sqrt(np.mean(np.square(plain_errors)))


def deterministic_queue_knee(capacity: float, limit_s: float) -> float:
    gaps = draw_gaps(1.0, 400_000, np.random.default_rng(0))
    rates = capacity * np.linspace(0.7, 0.98, 29)
    shares = [
        float((queue_waits(gaps / rate, np.full(400_000, 1 / capacity)) <= limit_s).mean()) for rate in rates
    ]
    return float(np.interp(-0.95, -np.array(shares), rates))


def queue_probe(capacity: float, limit_s: float, rate: float, rng: np.random.Generator) -> Probe:
    """The TTFT is made such that 0.5 s is kept exactly where the wait is within the limit."""
    due_s = np.cumsum(rng.exponential(1 / rate, round(60 * rate)))
    waits_s = queue_waits(np.diff(due_s, prepend=0.0), np.full(len(due_s), 1 / capacity))
    rows = [
        request(float(at_s), 0.5 * float(wait_s) / limit_s, 2.0, num_prompt_tokens=1, num_output_tokens=1)
        for at_s, wait_s in zip(due_s, waits_s, strict=True)
    ]
    return probe_of(rows, 60.0, rate=rate, warm_cut_s=5.0)


# Guards


@pytest.mark.parametrize(
    ("shares", "refuted"),
    [
        ([0.999, 0.998], True),
        ([0.85, 0.8], True),
        ([0.999, 0.9], False),
        ([0.97, 0.94], False),
        ([0.5], False),
    ],
)
def test_a_twin_is_refuted_by_two_probes_at_its_estimate_on_one_side(
    shares: list[float], refuted: bool
) -> None:
    assert twin_is_refuted([ProbeAtEstimate(share, by_twin=True) for share in shares], 0.95) is refuted
    assert not twin_is_refuted([ProbeAtEstimate(share, by_twin=False) for share in shares], 0.95)


def test_a_probe_is_hopeless_when_its_last_ten_seconds_are_mostly_bad_for_every_tier() -> None:
    early_good = [request(at / 10) for at in range(100)]
    late_bad = [request(10 + at / 10, ttft_s=3.0, stay_s=4.0) for at in range(150)]
    rows = early_good + late_bad
    assert is_hopeless(rows, 25.0, [TIER])
    assert not is_hopeless(rows, 15.0, [TIER])  # not before 20 s
    assert not is_hopeless(rows, 25.0, [TIER, SloTier(ttft_s=5.0)])  # it still says something about that one
    assert not is_hopeless(early_good, 25.0, [TIER])


def test_requests_that_still_wait_count_as_bad_once_they_are_late() -> None:
    waiting = [request(15 + at / 10, first_token_s=None, end_s=None) for at in range(100)]
    assert is_hopeless(waiting, 25.0, [TIER])
    assert not is_hopeless(waiting, 25.0, [SloTier(ttft_s=20.0)])


def test_validation_keeps_more_distance_where_probes_tell_less() -> None:
    def share_at(rate: float) -> float:
        return float(logistic(np.array(logit(0.95) - 20 * math.log(rate / 10))))

    assert validation_rates(10.0, 1.0, 0.95, share_at, 1e6) == pytest.approx((9.0, 11.0))
    assert validation_rates(10.0, 2.0, 0.95, share_at, 1e6) == pytest.approx((8.5, 12.0))
    low, high = validation_rates(10.0, 1.0, 0.95, share_at, 0.5)  # five independent requests
    assert 5.9 < low < 8.9
    assert 11.1 < high < 14.1


def test_the_bracket_is_what_was_clearly_kept_below_what_was_clearly_broken() -> None:
    def at(rate: float, good: int) -> Probe:
        rows = [
            request(number / 10, ttft_s=0.1 if number < good else 2.0, stay_s=3.0) for number in range(100)
        ]
        return probe_of(rows, 10.0, rate=rate)

    found = bracket([at(8.0, 100), at(9.0, 95), at(10.0, 80), at(11.0, 100)], TIER, 2.0)
    assert (found.feasible_max, found.infeasible_min) == (8.0, 10.0)
    assert bracket([at(9.0, 95)], TIER, 2.0).breached is None
    assert bracket([at(10.0, 80)], TIER, 20.0).breached is None  # 100 requests worth 5 tell nothing


# Saturation, warm-up, shape


def test_saturation_is_the_slope_of_completions_after_the_first_third() -> None:
    """Nothing ends for ten seconds, then five a second: 30 s hold 100 ends, but the rate is 5."""
    rows = [request(0.0, stay_s=10 + number / 5) for number in range(100)]
    rate, log_sd = completion_slope(probe_of(rows, 30.0, rate=None, kind="saturation"))
    assert rate == pytest.approx(5.0, rel=0.01)
    assert log_sd < 0.05
    assert completion_slope(probe_of([], 30.0)) == (0.0, math.inf)


def test_slots_are_what_ran_while_others_waited() -> None:
    samples = [
        ServerSample(at_s=1.0, running=3.0, waiting=0.0),
        ServerSample(at_s=2.0, running=8.0, waiting=5.0),
        ServerSample(at_s=3.0, running=9.0, waiting=0.0),
    ]
    assert slots_in_use(probe_of([], 5.0, samples=samples)) == 8
    assert slots_in_use(probe_of([], 5.0, samples=samples[:1])) is None


def test_clients_are_doubled_until_the_server_is_full() -> None:
    prober = SimulatedProber(BatchingParameters(max_num_seqs=16), LengthLaw(60, 0.3, 30, 0.3), seed=1)
    growth = Growth(1024)
    plan = ClosedLoopPlan(growth.concurrency, 30, 0, next_concurrency=growth.next_concurrency)
    probe = asyncio.run(prober.closed_loop(plan))
    assert 16 < growth.concurrency <= 64
    assert growth.is_steady
    assert probe.end_s < 25


def test_growth_gives_up_on_a_server_that_refuses_everything() -> None:
    failed = [request(0.1 * number, failed=True, first_token_s=None) for number in range(8)]
    assert Growth(64).next_concurrency(failed, 1.0) is None


def test_steady_is_when_three_means_of_tpot_agree() -> None:
    def at(time_s: float, tpot_s: float) -> ProbedRequest:
        return request(time_s - 1, first_token_s=time_s - 10 * tpot_s, end_s=time_s)

    level = [at(1 + number / 5, 0.02) for number in range(45)]
    falling = [at(1 + number / 5, 0.05 - 0.0008 * number) for number in range(45)]
    assert is_steady(level, 10.0)
    assert not is_steady(falling, 10.0)
    assert not is_steady(level[:20], 10.0)  # nothing ended lately


def test_the_shape_knee_is_where_log_ttft_turns_up() -> None:
    rates = np.array([3.0, 5.0, 6.5, 8.0, 9.0, 10.0])
    hockey_stick = np.array([0.10, 0.11, 0.12, 0.14, 0.6, 4.0])
    found = shape_knee(rates, hockey_stick)
    assert found is not None
    assert 7.0 < found < 9.0
    assert shape_knee(rates, np.exp(rates)) is None  # a straight line in the logarithm
    assert shape_knee(rates[:2], hockey_stick[:2]) is None


def test_littles_law_sees_a_lost_record() -> None:
    rows = [request(number / 20, stay_s=1.0) for number in range(400)]
    counts = [(at / 4, sum(row.due_s <= at / 4 < row.due_s + 1 for row in rows)) for at in range(1, 80)]
    whole = little_error(probe_of(rows, 20.0, in_flight=counts))
    lossy = little_error(probe_of(rows[::10] + rows[1::2], 20.0, in_flight=counts))
    assert whole is not None
    assert lossy is not None
    assert whole < 0.01
    assert lossy > 0.2


def test_probes_that_are_all_good_leave_the_knee_open_above() -> None:
    """Also far above the guess: the end of what is searched must not look like a certain answer."""
    blocks = Blocks(np.array([4.0, 6.0, 8.0, 10.0]), np.full(4, 300.0), np.ones(4))
    fit = fit_plain(blocks, 0.95, 4.0, 0.25, np.random.default_rng(0))
    low, high = interval(fit.draws)
    assert fit.rate > 8
    assert high > 1.2 * low


def test_of_few_lags_a_single_late_one_proves_nothing() -> None:
    assert late_percentile([0.001] * 49 + [0.5]) == 0.001
    assert late_percentile([0.001] * 48 + [0.4, 0.5]) == 0.4
    assert late_percentile([0.001] * 960 + [0.5] * 40) == 0.5
    assert late_percentile([0.3]) == 0.3


@pytest.mark.parametrize(
    ("tiers", "limit_s"),
    [
        ((), 0.010),
        ((SloTier("a", ttft_s=0.1),), 0.010),
        ((SloTier("a", ttft_s=2.0),), 0.040),
        ((SloTier("a", tpot_s=5.0),), 0.010),
        ((SloTier("a", ttft_s=2.0), SloTier("b", e2el_s=1.0)), 0.020),
    ],
)
def test_the_generator_may_be_later_where_promises_are_longer(
    tiers: tuple[SloTier, ...], limit_s: float
) -> None:
    assert lag_limit_s(tiers) == pytest.approx(limit_s)


def test_requests_that_a_server_refused_were_sent_by_the_generator() -> None:
    rows = [request(0.1 * index, failed=True) for index in range(100)]
    for row in rows:
        row.sent_s, row.end_s = None, row.due_s + 0.001
    refused = probe_of(rows, 10.0, rate=10.0, cv=0.0)
    checks = {check.check: check for check in check_validity([refused], (), 0.0, None)}
    assert checks["delivered_rate"].passed
    assert not checks["error_share"].passed
    alone = ClientCheck(30.0, 30.0, 0.0, refused_share=1.0)
    assert [check.passed for check in check_validity([], (), 0.0, alone)] == [False]
