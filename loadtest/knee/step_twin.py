"""The step twin: iteration-level batching whose steps cost what clients saw. For limits on TPOT, and
others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadtest.knee.arrival_law import draw_gaps
from loadtest.knee.batch_recursion import simulate_batches
from loadtest.knee.observations import Floats, Requests
from loadtest.knee.seen_lengths import Lengths, or_mean
from loadtest.knee.slo import SloTier
from loadtest.knee.step_costs import StepCosts
from loadtest.knee.twin import NUM_GROUPS, long_run_knees


@dataclass(frozen=True, slots=True)
class StepTwin:
    """Iteration-level batching with step = a + b * batch + c * prefill. For TPOT, and for TTFT as well.

    The score is the worst latency in units of its limit, so a perfect twin has a threshold of 1.
    """

    costs: StepCosts
    tier: SloTier
    threshold_guess: float = 1.0
    threshold_log_sd: float = 0.06
    name: str = "step_twin"
    measured_s: float = 70.0  # of each of many runs side by side
    warm_s: float = 35.0
    runs_per_group: int = 7

    def scores(self, probes: list[Requests]) -> list[Floats]:
        longest = max(len(probe) for probe in probes)

        def padded(column: str, filler: float) -> Floats:
            rows = np.full((len(probes), longest), filler)
            for row, probe in zip(rows, probes, strict=True):
                row[: len(probe)] = or_mean(getattr(probe, column))
            return rows

        score = self._scores(
            padded("due_s", np.inf), padded("num_prompt_tokens", 1.0), padded("num_output_tokens", 1.0)
        )
        return [row[: len(probe)] for row, probe in zip(score, probes, strict=True)]

    def long_run(self, rates: Floats, cv: float, lengths: Lengths, seed: int) -> Floats:
        rng = np.random.default_rng([seed, 2])
        num_runs = NUM_GROUPS * self.runs_per_group
        middle = float(np.median(rates))
        cut = math.ceil(self.warm_s * middle)
        num_requests = cut + math.ceil(self.measured_s * middle)
        arrivals = np.cumsum(draw_gaps(cv, (num_runs, num_requests), rng), axis=1)
        prompts, outputs = lengths.draw((num_runs, num_requests), rng)
        due_s = (arrivals[None] / rates[:, None, None]).reshape(-1, num_requests)
        score = self._scores(due_s, np.tile(prompts, (len(rates), 1)), np.tile(outputs, (len(rates), 1)))
        return score[:, cut:].reshape(len(rates), NUM_GROUPS, -1)

    def _scores(self, due_s: Floats, num_prompt_tokens: Floats, num_output_tokens: Floats) -> Floats:
        times = simulate_batches(self.costs, due_s, num_prompt_tokens, num_output_tokens)
        score = np.zeros(due_s.shape)
        for name, limit_s in self.tier.limits_s.items():
            score = np.maximum(score, getattr(times, f"{name}_s") / limit_s)
        return score


def predicted_knee(
    twin: StepTwin, attainment: float, cv: float, lengths: Lengths, top_rate: float, seed: int
) -> float:
    """Where the twin alone expects the knee, between 0.3 and 1 times `top_rate`: where to probe first."""
    rates = top_rate * np.array([0.3, 0.45, 0.6, 0.75, 0.85, 0.95])
    scores = twin.long_run(rates, cv, lengths, seed)
    shares = (scores <= 1.0).mean(axis=(1, 2))
    knee = float(long_run_knees(rates, shares[:, None], attainment)[0])
    return min(max(knee, float(rates[0])), top_rate)
