"""One tier's capacity from all of its probes: the plain fit, or a twin where one explains what was
measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadtest.knee.bootstrap import interval
from loadtest.knee.fit import PlainFit, fit_plain
from loadtest.knee.observations import Blocks, Floats, blocks_of, good_share
from loadtest.knee.probe import Probe
from loadtest.knee.queue_twin import QueueTwin, WorkWeights
from loadtest.knee.saturation import Saturation
from loadtest.knee.seen_lengths import Lengths, lengths_of
from loadtest.knee.slo import SloTier
from loadtest.knee.step_costs import fit_step_costs
from loadtest.knee.step_twin import StepTwin, predicted_knee
from loadtest.knee.twin import MIN_CORRELATION, Twin, TwinData, TwinFit, fit_twin, twin_data

PLAIN = "plain"
CLOSE_CORRELATION = 0.9  # another twin would not do better
MIN_TWIN_BLOCKS = 3
NUM_CAPACITIES = 5
USUAL_FRACTION = 0.85  # of saturation, where knees of Poisson arrivals are
BURSTINESS_COST = 0.13  # of it, for each unit of CV above 1
LOWEST_FRACTION = 0.3
HIGHEST_FRACTION = 0.92
GUESS_LOG_SD = 0.25
UNSURE_LOG_SD = 0.4


@dataclass(frozen=True, slots=True)
class Estimate:
    """Where a tier's knee is, as far as the probes tell."""

    rate: float
    low: float
    high: float
    method: str
    design_effect: float
    n_eff: float
    correlation: float | None
    plain: PlainFit
    blocks: Blocks
    draws: Floats
    twin: TwinFit | None = None
    notes: tuple[str, ...] = ()  # why a twin was not used

    @property
    def half_width(self) -> float:
        """As a share of the rate; the wider side of the two."""
        return max(self.high / self.rate - 1, 1 - self.low / self.rate)

    def is_one_sided(self, attainment: float) -> bool:
        """Whether no block of any probe came near to breaking the promise, or to keeping it."""
        margin = 0.6 * (1 - attainment)
        return bool(
            (self.blocks.good > attainment + margin).all() or (self.blocks.good < attainment - margin).all()
        )

    def share(self, rates: Floats, attainment: float) -> Floats:
        """The fitted share of good requests."""
        return self.plain.share(rates, attainment) if self.twin is None else self.twin.share(rates)


@dataclass(frozen=True, slots=True)
class EstimateInputs:
    """What is known besides the tier's own probes."""

    saturation: Saturation
    num_slots: int
    background: list[Probe]  # every probe so far, for lengths and the costs of steps
    guess: float
    guess_log_sd: float
    twins_allowed: bool = True


def estimate_capacity(probes: list[Probe], tier: SloTier, inputs: EstimateInputs, seed: int) -> Estimate:
    """`probes` are the tier's open-loop probes, of one arrival law."""
    rng = np.random.default_rng([seed, len(probes)])
    blocks = blocks_of(probes, tier)
    plain = fit_plain(blocks, tier.attainment, inputs.guess, inputs.guess_log_sd, rng)
    best: TwinFit | None = None
    correlation: float | None = None
    notes: list[str] = []
    lengths = lengths_of(inputs.background)
    if inputs.twins_allowed and lengths is not None and len(blocks) >= MIN_TWIN_BLOCKS:
        data = twin_data(probes, tier, blocks, lengths)
        fits = fit_twins(data, tier, inputs, plain.rate, seed, rng, notes)
        if fits:
            best = max(fits, key=lambda fit: -1.0 if math.isnan(fit.correlation) else fit.correlation)
            correlation = best.correlation
            if not best.correlation >= MIN_CORRELATION:
                notes.append(
                    f"no twin was used: the best one explains the blocks of the probes with a correlation of "
                    f"{best.correlation:.2f} only, below {MIN_CORRELATION}"
                )
                best = None
    draws, rate = (plain.draws, plain.rate) if best is None else (best.draws, best.rate)
    low, high = interval(draws)
    return Estimate(
        rate=rate,
        low=min(low, rate),
        high=max(high, rate),
        method=PLAIN if best is None else best.name,
        design_effect=plain.design_effect,
        n_eff=plain.n_eff,
        correlation=correlation,
        plain=plain,
        blocks=blocks,
        draws=draws,
        twin=best,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class Guess:
    """Where a knee is looked for before anything was probed."""

    rate: float
    log_sd: float


def first_guess(
    tier: SloTier, cv: float, inputs_background: list[Probe], saturation: Saturation, seed: int
) -> Guess:
    """By the step twin alone, from the unloaded and the saturated server; else at 0.85 of saturation."""
    step = fit_step_costs(inputs_background, saturation.num_slots)
    lengths = lengths_of(inputs_background)
    usual = USUAL_FRACTION - BURSTINESS_COST * max(0.0, cv - 1)
    if step is None or lengths is None or not step.has_right_form:
        return Guess(saturation.rate * max(LOWEST_FRACTION, usual), GUESS_LOG_SD)
    twin = StepTwin(step.costs, tier)
    knee = predicted_knee(twin, tier.attainment, cv, lengths, saturation.rate, seed)
    low, high = LOWEST_FRACTION * saturation.rate, HIGHEST_FRACTION * saturation.rate
    if not low < knee < high:  # as far as it goes, and less to be trusted
        return Guess(min(max(knee, low), high), UNSURE_LOG_SD)
    return Guess(knee, GUESS_LOG_SD)


def fit_twins(
    data: TwinData,
    tier: SloTier,
    inputs: EstimateInputs,
    centre: float,
    seed: int,
    rng: np.random.Generator,
    notes: list[str],
) -> list[TwinFit]:
    good = [good_share(requests, tier) for requests in data.requests]
    fits = []
    step = fit_step_costs(inputs.background, inputs.num_slots)
    if step is not None and step.has_right_form:
        fitted = fit_twin(StepTwin(step.costs, tier), data, good, centre, seed, rng)
        if fitted is not None:
            fits.append(fitted)
            if fitted.correlation >= CLOSE_CORRELATION:
                return fits
    elif step is not None:
        notes.append(
            f"the step twin was dropped: a step's cost is not its batch plus its prompts; "
            f"that misses the {step.worst_kind.replace('_', ' ')} probe's TPOT by {100 * step.misfit:.0f} %"
        )
    queue = _queue_twin_fit(data, tier, inputs, good, centre, seed, rng)
    if queue is not None:
        fits.append(queue)
    return fits


def _queue_twin_fit(
    data: TwinData,
    tier: SloTier,
    inputs: EstimateInputs,
    good: list[Floats],
    centre: float,
    seed: int,
    rng: np.random.Generator,
) -> TwinFit | None:
    """The queue twin under several capacities, each as likely as the saturation probe and its own residuals
    say."""
    if tier.ttft_s is None and tier.e2el_s is None:
        return None
    saturation = inputs.saturation
    weights = work_weights(data.lengths, inputs)
    mean_work = float(weights.of(data.lengths.num_prompt_tokens, data.lengths.num_output_tokens).mean())
    guess = inputs.num_slots / saturation.rate * 0.5 + (tier.ttft_s or tier.e2el_s or 1.0)
    offsets = np.linspace(-1.5, 1.5, NUM_CAPACITIES)
    fits, log_weights = [], []
    for offset in offsets:
        capacity = saturation.rate * math.exp(offset * saturation.log_sd)
        twin: Twin = QueueTwin(capacity, weights, mean_work, guess)
        fitted = fit_twin(twin, data, good, centre, seed, rng)
        if fitted is None:
            continue
        fits.append(fitted)
        squares = float((fitted.residuals**2).sum()) + 0.02**2
        log_weights.append(-0.5 * offset**2 - 0.25 * len(data.blocks) * math.log(squares))
    if not fits:
        return None
    share = np.exp(np.array(log_weights) - max(log_weights))
    share /= share.sum()
    which = rng.choice(len(fits), size=len(fits[0].draws), p=share)
    draws = np.stack([fitted.draws for fitted in fits])[which, np.arange(len(which))]
    best = fits[int(np.argmax(share))]
    rate = float(
        np.exp(sum(weight * math.log(fitted.rate) for weight, fitted in zip(share, fits, strict=True)))
    )
    scale = rate / best.rate
    return TwinFit(
        name=best.name,
        rate=rate,
        threshold=best.threshold,
        correlation=best.correlation,
        residuals=best.residuals,
        draws=draws,
        rates=best.rates * scale,
        shares=best.shares,
    )


def work_weights(lengths: Lengths, inputs: EstimateInputs) -> WorkWeights:
    """From the costs of steps where those are known: a full batch shares the base of each step."""
    step = fit_step_costs(inputs.background, inputs.num_slots)
    if step is not None:
        costs = step.costs
        return WorkWeights(costs.per_prefill_token_s, costs.base_s / inputs.num_slots + costs.per_sequence_s)
    # Half for the prompt, half for the answer, on average.
    return WorkWeights(
        0.5 / float(lengths.num_prompt_tokens.mean()), 0.5 / float(lengths.num_output_tokens.mean())
    )
