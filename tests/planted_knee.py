"""The true knee of a simulated server: what a search with no limit of time would find."""

from __future__ import annotations

import math

import numpy as np

from loadtest.knee.arrival_law import draw_gaps
from loadtest.knee.batch_recursion import simulate_batches
from loadtest.knee.simulated_prober import LengthLaw
from loadtest.knee.slo import SloTier
from loadtest.knee.step_costs import StepCosts
from loadtest.simulator.batching_model import BatchingModel, BatchingParameters

WARM_S = 60.0


def true_knee(
    parameters: BatchingParameters, lengths: LengthLaw, tier: SloTier, cv: float, around: float, hours: float
) -> float:
    """The rate at which the long-run share of good requests is the promised one. `around`: within 15 % of it.

    The same arrivals and lengths at five rates, so that what differs is the rate; between them the logit of
    the share is a line. Without a planted slowdown all runs go in lockstep; the two ways agree to the last
    digit.
    """
    rng = np.random.default_rng(20_261)
    rates = around * np.array([0.87, 0.94, 1.0, 1.06, 1.13])
    num_runs = max(4, math.ceil(hours * 3600 / 240))
    cut = math.ceil(WARM_S * around)
    num_requests = cut + math.ceil(hours * 3600 / num_runs * around)
    gaps = draw_gaps(cv, (num_runs, num_requests), rng)
    prompts, outputs = lengths.draw((num_runs, num_requests), rng)
    shares = []
    for rate in rates:
        due_s = np.cumsum(gaps, axis=1) / rate
        if parameters.decode_slowdown_per_prefill_token:
            latencies = np.stack(
                [model_latencies(parameters, *run) for run in zip(due_s, prompts, outputs, strict=True)],
                axis=1,
            )
            ttft_s, tpot_s, e2el_s = latencies
        else:
            costs = StepCosts(
                parameters.step_base_s,
                parameters.step_per_sequence_s,
                parameters.step_per_prefill_token_s,
                parameters.max_num_seqs,
                parameters.max_step_tokens,
            )
            times = simulate_batches(costs, due_s, prompts, outputs)
            ttft_s, tpot_s, e2el_s = times.ttft_s, times.tpot_s, times.e2el_s
        good = np.ones(due_s.shape, dtype=bool)
        for name, latency_s in (("ttft", ttft_s), ("tpot", tpot_s), ("e2el", e2el_s)):
            good &= latency_s <= tier.limits_s.get(name, math.inf)
        shares.append(float(good[:, cut:].mean()))
    height = [math.log(share / (1 - share)) for share in np.clip(shares, 1e-4, 1 - 1e-4)]
    wanted = math.log(tier.attainment / (1 - tier.attainment))
    assert height[0] > wanted > height[-1], f"the knee is not within 13 % of {around}: {shares}"
    return float(np.exp(np.interp(-wanted, -np.array(height), np.log(rates))))


def model_latencies(
    parameters: BatchingParameters, due_s: np.ndarray, prompts: np.ndarray, outputs: np.ndarray
) -> np.ndarray:
    """TTFT, TPOT and E2EL of one run of the batching model itself. [3, num_requests]"""
    model: BatchingModel[int] = BatchingModel(parameters)
    first_s, end_s = np.full(len(due_s), np.nan), np.full(len(due_s), np.nan)
    now_s, arrived, num_ended = 0.0, 0, 0
    due = due_s.tolist()
    while num_ended < len(due):
        while arrived < len(due) and due[arrived] <= now_s:
            model.submit(arrived, int(prompts[arrived]), int(outputs[arrived]))
            arrived += 1
        step = model.next_step()
        if step is None:
            now_s = due[arrived]
            continue
        now_s += step.duration_s
        for key in step.first:
            first_s[key] = now_s
        for key in step.finished:
            end_s[key] = now_s
        num_ended += len(step.finished)
    return np.stack([first_s - due_s, (end_s - first_s) / np.maximum(outputs - 1, 1), end_s - due_s])
