"""Small models of the server, fed with the very arrivals and lengths of the probes: control variates.

A twin gives each request a *score*, the worse the higher, and calls it good if the score is at most a
threshold. That threshold is fitted so that twin and measurement agree on the probes, block by block and on
average; the twin is then run for as long as it takes to know its own knee under that threshold. What luck
the probes had with their arrivals, the twin had as well, and so it cancels out.

A twin of the wrong form is biased, and no bootstrap of its blocks says so: see guards.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loadtest.knee.bootstrap import NUM_DRAWS, block_weights
from loadtest.knee.fit import logit
from loadtest.knee.observations import (
    Blocks,
    Floats,
    Requests,
    block_index,
    block_means,
    requests_of,
)
from loadtest.knee.probe import Probe
from loadtest.knee.seen_lengths import Lengths
from loadtest.knee.slo import SloTier

MIN_CORRELATION = 0.6  # of block residuals; below, the twin explains too little to be worth its risk
NUM_THRESHOLDS = 161
RATE_FACTORS = (0.72, 0.84, 0.93, 1.0, 1.08, 1.2)
NUM_GROUPS = 8  # of long runs, whose spread is the twin's own uncertainty
SHARE_FLOOR = 1e-3
FORM_LOG_SD = 0.015  # of the knee: a small model is not the server, even where it fits
SMALL_SAMPLE_BLOCKS = (
    4.0  # the spread of few residuals is itself uncertain, as Student's t takes into account
)
RESIDUAL_FLOOR = 0.01  # of a block's share: no twin is better than that


class Twin(Protocol):
    """One form with its parameters settled."""

    @property
    def name(self) -> str: ...

    @property
    def threshold_guess(self) -> float: ...

    @property
    def threshold_log_sd(self) -> float: ...

    def scores(self, probes: list[Requests]) -> list[Floats]:
        """Of each request of each probe, in order; every probe begins with an empty server."""

    def long_run(self, rates: Floats, cv: float, lengths: Lengths, seed: int) -> Floats:
        """Scores in the long run. [num_rates, NUM_GROUPS, num_requests]"""


@dataclass(frozen=True, slots=True)
class TwinFit:
    """A twin that was brought to agree with the probes."""

    name: str
    rate: float
    threshold: float
    correlation: float  # nan: neither measurement nor twin varied
    residuals: Floats  # measured - twin, [num_blocks]
    draws: Floats  # of the knee, [NUM_DRAWS]
    rates: Floats  # of its long runs
    shares: Floats  # in the long run, at the fitted threshold, [num_rates]

    def share(self, rates: Floats) -> Floats:
        return np.interp(np.log(rates), np.log(self.rates), self.shares)


@dataclass(frozen=True, slots=True)
class TwinData:
    """What twins are fitted to: one tier's blocks, and the requests behind them."""

    probes: list[Probe]
    requests: list[Requests]
    blocks: Blocks
    attainment: float
    cv: float
    lengths: Lengths


def twin_data(probes: list[Probe], tier: SloTier, blocks: Blocks, lengths: Lengths) -> TwinData:
    kept = [probe for probe in probes if probe.requests]
    return TwinData(
        probes=kept,
        requests=[requests_of(probe.requests) for probe in kept],
        blocks=blocks,
        attainment=tier.attainment,
        cv=kept[0].cv or 0.0,
        lengths=lengths,
    )


def fit_twin(
    twin: Twin, data: TwinData, good: list[Floats], centre: float, seed: int, rng: np.random.Generator
) -> TwinFit | None:
    """None if the twin has no knee near any rate that was tried."""
    thresholds = twin.threshold_guess * np.exp(np.linspace(-1, 1, NUM_THRESHOLDS) * 3 * twin.threshold_log_sd)
    modelled = _modelled_blocks(twin, data, good, thresholds)  # [num_blocks, num_thresholds]
    difference = data.blocks.good[:, None] - modelled
    num_blocks = len(data.blocks)
    mean_difference = difference.mean(axis=0)
    penalty = (np.log(thresholds / twin.threshold_guess) / twin.threshold_log_sd) ** 2
    spread = RESIDUAL_FLOOR
    best = 0
    for _ in range(2):
        best = int(np.argmin(num_blocks * (mean_difference / spread) ** 2 + penalty))
        # Two residuals more, of the usual size: a few that happen to agree must not look like certainty.
        squares = (difference[:, best] ** 2).sum() + 2 * RESIDUAL_FLOOR**2
        spread = max(RESIDUAL_FLOOR, math.sqrt(squares / (num_blocks + 2)))
    knees = None
    for _ in range(4):
        rates = centre * np.array(RATE_FACTORS)
        by_group = _long_run_shares(twin, rates, data, thresholds, seed)  # [groups, rates, thresholds]
        shares = by_group.mean(axis=0)
        knees = long_run_knees(rates, shares, data.attainment)
        if RATE_FACTORS[0] < knees[best] / centre < RATE_FACTORS[-1]:
            break
        centre = float(np.clip(knees[best], rates[0] * 0.8, rates[-1] * 1.2))
    else:
        return None
    group_knees = np.array([long_run_knees(rates, group, data.attainment)[best] for group in by_group])
    own_log_sd = float(np.log(group_knees).std(ddof=1)) / math.sqrt(len(group_knees))
    weights = block_weights(num_blocks, NUM_DRAWS, rng)
    # Of residuals, not of blocks: a draw of good blocks only would leave the threshold open.
    error = (weights @ difference[:, best] - difference[:, best].sum()) / num_blocks
    error *= math.sqrt(1 + SMALL_SAMPLE_BLOCKS / num_blocks)
    drawn_difference = mean_difference[None, :] + error[:, None]
    guesses = np.log(twin.threshold_guess) + twin.threshold_log_sd * rng.standard_normal(NUM_DRAWS)
    penalties = ((np.log(thresholds)[None, :] - guesses[:, None]) / twin.threshold_log_sd) ** 2
    drawn = np.argmin(num_blocks * (drawn_difference / spread) ** 2 + penalties, axis=1)
    draws = knees[drawn] * np.exp(math.hypot(own_log_sd, FORM_LOG_SD) * rng.standard_normal(NUM_DRAWS))
    long_run = np.interp(np.log(data.blocks.rate), np.log(rates), shares[:, best])
    return TwinFit(
        name=twin.name,
        rate=float(knees[best]),
        threshold=float(thresholds[best]),
        correlation=residual_correlation(data.blocks.good, modelled[:, best], long_run),
        residuals=difference[:, best],
        draws=draws,
        rates=rates,
        shares=shares[:, best],
    )


def residual_correlation(measured: Floats, modelled: Floats, long_run: Floats) -> float:
    """How much of the blocks' luck the twin knows about; nan if they do not vary.

    Of the residuals against one and the same curve, as the rates of the probes alone would correlate both;
    and not more than of the shares themselves, as blocks that are all good deviate from a curve alike.
    """
    plain, residual = correlation(measured, modelled), correlation(measured - long_run, modelled - long_run)
    return min(plain, residual) if not math.isnan(plain + residual) else math.nan


def correlation(first: Floats, second: Floats) -> float:
    """Pearson's; nan if one of them does not vary."""
    if len(first) < 3 or first.std() < 1e-6 or second.std() < 1e-6:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _modelled_blocks(twin: Twin, data: TwinData, good: list[Floats], thresholds: Floats) -> Floats:
    """Over the same requests as the measured blocks: those whose fate is unknown are left out of both."""
    columns = []
    for probe, requests, known, scores in zip(
        data.probes, data.requests, good, twin.scores(data.requests), strict=True
    ):
        index = block_index(probe, requests.due_s)
        index = np.where(np.isnan(known), -1, index)
        per_threshold = [
            block_means(index, (scores <= threshold).astype(float))[0] for threshold in thresholds
        ]
        columns.append(np.stack(per_threshold, axis=1))
    return np.concatenate(columns)


def _long_run_shares(twin: Twin, rates: Floats, data: TwinData, thresholds: Floats, seed: int) -> Floats:
    scores = np.sort(twin.long_run(rates, data.cv, data.lengths, seed), axis=-1)
    shares = np.empty((scores.shape[1], len(rates), len(thresholds)))
    for rate in range(scores.shape[0]):
        for group in range(scores.shape[1]):
            below = np.searchsorted(scores[rate, group], thresholds, side="right")
            shares[group, rate] = below / scores.shape[-1]
    return shares


def long_run_knees(rates: Floats, shares: Floats, attainment: float) -> Floats:
    """For each threshold, the rate at which the share is the promised one. [num_thresholds]

    Linear in logit and log rate between and beyond the rates; beyond, only to say in which direction.
    """
    clipped = np.clip(np.minimum.accumulate(shares, axis=0), SHARE_FLOOR, 1 - SHARE_FLOOR)
    height = np.log(clipped / (1 - clipped)) - logit(attainment)  # falls along the rates
    log_rates = np.log(rates)
    above = np.clip((height > 0).sum(axis=0), 1, len(rates) - 1)  # the interval that holds the knee
    column = np.arange(shares.shape[1])
    upper, lower = height[above - 1, column], height[above, column]
    slope = np.minimum((lower - upper) / (log_rates[above] - log_rates[above - 1]), -1e-3)
    knee = log_rates[above - 1] - upper / slope
    low, high = log_rates[0] - 1.0, log_rates[-1] + 1.0
    return np.asarray(np.exp(np.clip(knee, low, high)))
