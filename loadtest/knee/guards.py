"""What protects a search from a model that is wrong, and from probes that cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.knee.observations import good_share, requests_of
from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.knee.slo import SloTier

NEAR_ESTIMATE = 0.04  # of the estimate at the time: what counts as a probe "at the estimate"
ALL_GOOD = 0.995
CLEARLY_BAD = 0.90
HOPELESS_SHARE = 0.40
HOPELESS_FROM_S = 20.0
HOPELESS_OVER_S = 10.0
POISSON_SIDES = (0.90, 1.10)
BURSTY_SIDES = (0.85, 1.20)
BURSTY_FROM_CV = 1.5
FARTHEST_SIDES = (0.6, 1.4)
CLEAR_SPREADS = 2.5  # of a probe: blocks that are few understate it
CLEAR_BREACH_SPREADS = 1.645  # one side of 95 %
SHARE_FLOOR = 0.002


@dataclass(frozen=True, slots=True)
class ProbeAtEstimate:
    """What a probe measured where a fit had put the knee."""

    share: float
    by_twin: bool


def twin_is_refuted(latest: Sequence[ProbeAtEstimate], attainment: float) -> bool:
    """Whether the two latest probes at a twin's own estimate both read nearly all good, or both clearly bad.

    A right model is off by noise only, which falls on both sides. The bounds are those for an attainment of
    0.95, and scaled for others.
    """
    if len(latest) < 2 or not all(probe.by_twin for probe in latest[-2:]):
        return False
    all_good, clearly_bad = bounds(attainment)
    shares = [probe.share for probe in latest[-2:]]
    return all(share > all_good for share in shares) or all(share < clearly_bad for share in shares)


def next_rate_outside(rate: float, probes: Sequence[Probe], tier: SloTier, saturation_rate: float) -> float:
    """The rate itself; but well outside of what was probed, if all of that was nearly all good, or clearly
    bad.

    A fit to probes of one kind only is its prior, and moves on by a few percent each time. Bisection does
    not.
    """
    all_good, clearly_bad = bounds(tier.attainment)
    shares = [(probe.rate, probe_share(probe, tier)) for probe in probes if probe.rate is not None]
    if shares and all(share > all_good for _, share in shares):
        top = max(probed for probed, _ in shares)
        return max(rate, float(top ** (1 / 3) * (1.05 * max(saturation_rate, top)) ** (2 / 3)))
    if shares and all(share < clearly_bad for _, share in shares):
        return min(rate, 0.85 * min(probed for probed, _ in shares))
    return rate


def bounds(attainment: float) -> tuple[float, float]:
    """What reads as nearly all good, and as clearly bad: 0.995 and 0.90 for a promise of 0.95."""
    bad = 1 - attainment
    return 1 - bad * (1 - ALL_GOOD) / 0.05, 1 - bad * (1 - CLEARLY_BAD) / 0.05


def probe_share(probe: Probe, tier: SloTier) -> float:
    """Good requests of the measured window; nan if nothing is known."""
    good = good_share(requests_of(probe.measured), tier)
    known = good[~np.isnan(good)]
    return float(known.mean()) if len(known) else float("nan")


def is_hopeless(rows: Sequence[ProbedRequest], at_s: float, tiers: Sequence[SloTier]) -> bool:
    """Whether under 40 % of what was due in the last 10 s is good for every tier: rejecting early costs
    nothing.

    Never the other way round: to accept early is biased, as probes begin on an empty server. A request that
    still runs is good so far unless it has waited longer than a limit allows.
    """
    if at_s < HOPELESS_FROM_S or not tiers:
        return False
    recent = [row for row in rows if row.due_s >= at_s - HOPELESS_OVER_S]
    if len(recent) < 5:
        return False
    return all(
        sum(_is_good_so_far(row, at_s, tier) for row in recent) < HOPELESS_SHARE * len(recent)
        for tier in tiers
    )


def _is_good_so_far(row: ProbedRequest, at_s: float, tier: SloTier) -> bool:
    if row.failed:
        return False
    if tier.ttft_s is not None:
        seen_s = at_s if row.first_token_s is None else row.first_token_s
        if seen_s - row.due_s > tier.ttft_s:
            return False
    if tier.e2el_s is not None and (at_s if row.end_s is None else row.end_s) - row.due_s > tier.e2el_s:
        return False
    if tier.tpot_s is not None and row.end_s is not None:
        tpot = row.tpot
        return tpot is None or not tpot > tier.tpot_s
    return True


def validation_rates(
    estimate: float,
    cv: float,
    attainment: float,
    share_at: Callable[[float], float],
    independent_per_rate: float,
) -> tuple[float, float]:
    """So far to each side that a right estimate passes nearly always.

    At least -10 % / +10 %, for bursty arrivals -15 % / +20 %; farther where the fitted curve is flat, or a
    probe has few independent requests (`independent_per_rate` times its rate), until the promise is 2.5
    standard deviations of a probe away.
    """
    low, high = BURSTY_SIDES if cv >= BURSTY_FROM_CV else POISSON_SIDES

    def is_clear(rate: float) -> bool:
        share = min(max(share_at(rate), SHARE_FLOOR), 1 - SHARE_FLOOR)
        spread = math.sqrt(share * (1 - share) / max(independent_per_rate * rate, 1.0))
        return abs(share - attainment) >= CLEAR_SPREADS * spread

    while low > FARTHEST_SIDES[0] and not is_clear(low * estimate):
        low -= 0.01
    while high < FARTHEST_SIDES[1] and not is_clear(high * estimate):
        high += 0.01
    return estimate * low, estimate * high


@dataclass(frozen=True, slots=True)
class Bracket:
    """The highest probed rate that clearly kept the promise, and the lowest that clearly broke it."""

    feasible_max: float | None
    infeasible_min: float | None
    breached: Probe | None


def bracket(probes: Sequence[Probe], tier: SloTier, design_effect: float) -> Bracket:
    """Clearly kept: nearly all good. Clearly broken: by more than a probe at the limit would be by chance.

    A rate counts as feasible only below every clear breach.
    """
    all_good, _ = bounds(tier.attainment)
    breached: tuple[float, Probe] | None = None
    feasible: list[float] = []
    for probe in probes:
        share = probe_share(probe, tier)
        if probe.rate is None or math.isnan(share):
            continue
        num_independent = max(1.0, len(probe.measured) / design_effect)
        spread = math.sqrt(tier.attainment * (1 - tier.attainment) / num_independent)
        if share > all_good:
            feasible.append(probe.rate)
        elif share < tier.attainment - CLEAR_BREACH_SPREADS * spread and (
            breached is None or probe.rate < breached[0]
        ):
            breached = (probe.rate, probe)
    if breached is None:
        return Bracket(max(feasible, default=None), None, None)
    below = [rate for rate in feasible if rate < breached[0]]
    return Bracket(max(below, default=None), *breached)
