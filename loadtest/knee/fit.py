"""The plain fit: the share of good requests as a logistic function of the logarithm of the rate.

    logit share(rate) = logit p - steepness * log(rate / knee)

where p is the attainment that was promised, so that the knee is a parameter and not a result. All blocks of
all probes are pooled; a block weighs as many requests as it has, divided by the design effect. With few
blocks the data do not tell the steepness: a prior does, and its uncertainty goes into the draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadtest.knee.bootstrap import NUM_DRAWS, block_weights, design_effect
from loadtest.knee.observations import Blocks, Floats

STEEPNESS = 14.0  # of queues in front of batching engines: 10 to 25
STEEPNESS_LOG_SD = 0.5
PRIOR_DESIGN_EFFECT = 40.0  # simulated: 18 to 190 near the knee
PRIOR_BLOCKS = 2.0
MAX_DESIGN_EFFECT = 150.0  # more is a fit that is off, which must not silence the data that say so
NUM_KNEES = 281
LOG_SPAN = 1.2
NUM_STEEPNESSES = 13
SHARE_FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class PlainFit:
    rate: float
    steepness: float
    design_effect: float
    n_eff: float
    draws: Floats  # of the knee, [NUM_DRAWS]
    steepness_draws: Floats

    def share(self, rates: Floats, attainment: float) -> Floats:
        return logistic(logit(attainment) - self.steepness * np.log(rates / self.rate))

    def share_draws(self, rates: Floats, attainment: float) -> Floats:
        """[NUM_DRAWS, num_rates]"""
        distance = np.log(rates[None, :] / self.draws[:, None])
        return logistic(logit(attainment) - self.steepness_draws[:, None] * distance)


def fit_plain(
    blocks: Blocks,
    attainment: float,
    guess: float,
    guess_log_sd: float,
    rng: np.random.Generator,
) -> PlainFit:
    """`guess` is where the knee is looked for before anything was probed."""
    # Beyond all that was guessed and probed: a knee at the end of the grid would look certain.
    around = np.log(np.append(blocks.rate, guess))
    log_knees = np.linspace(around.min() - LOG_SPAN, around.max() + LOG_SPAN, NUM_KNEES)
    log_steep = math.log(STEEPNESS) + STEEPNESS_LOG_SD * np.linspace(-2.5, 2.5, NUM_STEEPNESSES)
    # [num_knees, num_steepnesses, num_blocks]
    distance = np.log(blocks.rate)[None, None, :] - log_knees[:, None, None]
    share = logistic(logit(attainment) - np.exp(log_steep)[None, :, None] * distance)
    share = np.clip(share, SHARE_FLOOR, 1 - SHARE_FLOOR)
    effect = PRIOR_DESIGN_EFFECT
    flat = share.reshape(NUM_KNEES * NUM_STEEPNESSES, len(blocks))
    likelihood = blocks.good * np.log(flat) + (1 - blocks.good) * np.log(1 - flat)
    likelihood *= blocks.num_requests
    knee_prior = -0.5 * ((log_knees - math.log(guess)) / guess_log_sd) ** 2
    steep_prior = -0.5 * ((log_steep - math.log(STEEPNESS)) / STEEPNESS_LOG_SD) ** 2
    prior = (knee_prior[:, None] + steep_prior[None, :]).ravel()
    best = 0
    for _ in range(3):  # the design effect depends on the fit, weakly
        best = int(np.argmax(likelihood.sum(axis=1) / effect + prior))
        effect = design_effect(
            blocks.good, blocks.num_requests, flat[best], PRIOR_DESIGN_EFFECT, PRIOR_BLOCKS
        )
        effect = min(effect, MAX_DESIGN_EFFECT)
    knee_at, steep_at = divmod(best, NUM_STEEPNESSES)
    # Each draw has its own blocks and its own prior: where the data say nothing, the prior's width is left.
    weights = block_weights(len(blocks), NUM_DRAWS, rng) if len(blocks) else np.zeros((NUM_DRAWS, 0))
    guesses = math.log(guess) + guess_log_sd * rng.standard_normal(NUM_DRAWS)
    steeps = math.log(STEEPNESS) + STEEPNESS_LOG_SD * rng.standard_normal(NUM_DRAWS)
    score = weights @ (likelihood.T / effect)  # [num_draws, num_knees * num_steepnesses]
    score = score.reshape(NUM_DRAWS, NUM_KNEES, NUM_STEEPNESSES)
    score -= 0.5 * (((log_knees[None, :] - guesses[:, None]) / guess_log_sd) ** 2)[:, :, None]
    score -= 0.5 * (((log_steep[None, :] - steeps[:, None]) / STEEPNESS_LOG_SD) ** 2)[:, None, :]
    drawn_knees, drawn_steeps = np.divmod(score.reshape(NUM_DRAWS, -1).argmax(axis=1), NUM_STEEPNESSES)
    return PlainFit(
        rate=float(np.exp(log_knees[knee_at])),
        steepness=float(np.exp(log_steep[steep_at])),
        design_effect=effect,
        n_eff=float(blocks.num_requests.sum()) / effect,
        draws=np.exp(log_knees[drawn_knees]),
        steepness_draws=np.exp(log_steep[drawn_steeps]),
    )


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def logistic(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -40, 40)))
