"""From what a search found to what may be said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadtest.knee.bootstrap import interval
from loadtest.knee.estimate import PLAIN, Estimate
from loadtest.knee.fit import PRIOR_DESIGN_EFFECT
from loadtest.knee.guards import bracket, probe_share
from loadtest.knee.observations import broken_constraint, percentile_with_failures, requests_of
from loadtest.knee.probe import Probe
from loadtest.knee.procedure import Cell, SearchOutcome
from loadtest.knee.result import (
    BoundaryType,
    Breach,
    CurvePoint,
    ShapeKnee,
    SloCapacity,
    SloRow,
    Status,
    TierResult,
)
from loadtest.knee.shape_knee import DEFINITION, shape_knee
from loadtest.knee.slo import SloTier
from loadtest.knee.validity import check_validity
from loadtest.validity import ValidityCheck

CLIFF_STEEPNESS = 30.0  # of the fit: from all good to half bad within about a tenth of the rate
CURVE_FRACTIONS = np.linspace(0.5, 1.3, 33)
STATUS_ORDER: tuple[Status, ...] = ("resolved", "unresolved", "infeasible", "invalid", "client_bound")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judged part of a result."""

    tiers: list[TierResult]
    shape_knee: ShapeKnee | None
    status: Status
    reasons: list[str]
    validity: list[ValidityCheck]


def judge(outcome: SearchOutcome) -> Verdict:
    settings = outcome.settings
    validity = check_validity(outcome.probes, settings.tiers, settings.declared_hit_share, outcome.client)
    broken = [check for check in validity if not check.passed]
    reasons = [outcome.stopped] if outcome.stopped else []
    reasons += [
        f"{check.check}: {check.reason}"
        + (f" ({check.value:.3g}, limit {check.limit:.3g})" if check.value is not None else "")
        for check in broken
    ]
    if outcome.interrupted_in is not None:
        reasons.insert(0, f"interrupted in the phase {outcome.interrupted_in!r}")
    is_invalid = bool(broken) or outcome.stopped is not None
    tiers = [_tier_result(outcome, cell, is_invalid) for cell in outcome.cells]
    shape = None if settings.tiers else _shape(outcome)
    if not settings.tiers and shape is None and not is_invalid:
        reasons.append("the curve of p95 TTFT does not bend between 0.3 and 1.0 of saturation")
    if outcome.is_client_bound:
        status: Status = "client_bound"
    elif outcome.interrupted_in is not None:
        status = "unresolved"
    elif is_invalid:
        status = "invalid"
    elif tiers:
        status = max((tier.status for tier in tiers), key=STATUS_ORDER.index)
    else:
        status = "unresolved" if shape is None else "resolved"
    if not outcome.was_steady and not outcome.stopped:
        reasons.append("note: the latency had not become steady when the warm-up's time was over")
    return Verdict(tiers=tiers, shape_knee=shape, status=status, reasons=reasons, validity=validity)


def slo_row(tier: SloTier) -> SloRow:
    limits = {f"{name}_ms": round(1000 * limit_s, 6) for name, limit_s in tier.limits_s.items()}
    return SloRow(name=tier.name, attainment=tier.attainment, **limits)


def _tier_result(outcome: SearchOutcome, cell: Cell, is_invalid: bool) -> TierResult:
    tier, estimate = cell.tier, cell.estimate
    open_loop = [
        probe for probe in outcome.probes if probe.kind in ("open_loop", "validation") and probe.cv == cell.cv
    ]
    effect = PRIOR_DESIGN_EFFECT if estimate is None else estimate.design_effect
    found = bracket(open_loop, tier, effect)
    breach = None
    if found.breached is not None and found.breached.rate is not None:
        breach = Breach(
            rate=found.breached.rate,
            constraint=broken_constraint(requests_of(found.breached.measured), tier) or "failures",
            attainment=probe_share(found.breached, tier),
        )
    reasons = [*cell.reasons, *(() if estimate is None else estimate.notes)]
    validated, contradiction = _validated(cell)
    status = _status(outcome, cell, reasons, is_invalid)
    if contradiction is not None:
        reasons.append(contradiction)
        status = "unresolved" if status == "resolved" else status
    capacity = None if status == "client_bound" or estimate is None else _capacity(estimate)
    return TierResult(
        name=tier.name,
        slo=slo_row(tier),
        arrival_cv=cell.cv,
        slo_capacity=capacity,
        feasible_max=found.feasible_max,
        infeasible_min=found.infeasible_min,
        first_breach=breach,
        binding_constraint=_binding_constraint(open_loop or outcome.probes, tier),
        boundary_type=_boundary_type(estimate),
        status=status,
        validated=validated and not is_invalid,
        reasons=reasons,
        knee_fraction=None
        if capacity is None or outcome.saturation is None
        else capacity.rate / outcome.saturation.rate,
        twin_correlation=None if estimate is None else estimate.correlation,
        open_side=None if estimate is None else _open_side(outcome, estimate, tier),
        curve=[] if estimate is None or capacity is None else _curve(estimate, tier),
    )


def _status(outcome: SearchOutcome, cell: Cell, reasons: list[str], is_invalid: bool) -> Status:
    if outcome.is_client_bound:
        reasons.append("the generator cannot send at this rate in time; give it more processors")
        return "client_bound"
    if cell.tier.name in outcome.infeasible:
        reasons.append("single requests on an idle server already break the limits")
        return "infeasible"
    if outcome.interrupted_in is not None:
        reasons.append("interrupted")
        return "unresolved"
    if is_invalid:
        return "invalid"
    if cell.estimate is None:
        reasons.append("the budget ended before the first open-loop probe")
        return "unresolved"
    tolerance = outcome.settings.tolerance
    if outcome.saturation is not None and cell.estimate.low > outcome.saturation.ci90[1]:
        reasons.append("the estimate lies above the rate at which the server was full, which it cannot")
        return "unresolved"
    if cell.estimate.is_one_sided(cell.tier.attainment):
        reasons.append(
            "all probes were on one side: none came near to breaking the promise, or all did break it"
        )
        return "unresolved"
    if cell.half_width > tolerance:
        reasons.append(
            f"the interval is wider than ± {100 * tolerance:.3g} %, and the budget of "
            f"{outcome.settings.budget_s:.4g} s has ended"
        )
        return "unresolved"
    return "resolved"


def _open_side(outcome: SearchOutcome, estimate: Estimate, tier: SloTier) -> Literal["above", "below"] | None:
    """Where no probe bounds the estimate, or saturation contradicts it."""
    if outcome.saturation is not None and estimate.rate > outcome.saturation.ci90[1]:
        return "above"
    if not estimate.is_one_sided(tier.attainment):
        return None
    return "above" if bool((estimate.blocks.good > tier.attainment).all()) else "below"


def _validated(cell: Cell) -> tuple[bool, str | None]:
    """Whether the pair confirms the estimate; else what it says against it."""
    if cell.validation is None:
        return False, None
    below, above = cell.validation
    share_below, share_above = (probe_share(probe, cell.tier) for probe in cell.validation)
    if share_below >= cell.tier.attainment > share_above:
        return True, None
    return False, (
        f"validation contradicts the estimate: {share_below:.3f} good at {below.rate:.4g} requests/s, "
        f"{share_above:.3f} at {above.rate:.4g}"
    )


def _capacity(estimate: Estimate) -> SloCapacity:
    return SloCapacity(
        rate=estimate.rate,
        ci90=(estimate.low, estimate.high),
        method=estimate.method,
        n_eff=estimate.n_eff,
        design_effect=estimate.design_effect,
    )


def _boundary_type(estimate: Estimate | None) -> BoundaryType:
    if estimate is None or len(estimate.blocks) < 3 or estimate.blocks.good.min() > 0.99:
        return "unknown"
    return "cliff" if estimate.plain.steepness > CLIFF_STEEPNESS else "smooth"


def _binding_constraint(probes: Sequence[Probe], tier: SloTier) -> str | None:
    return broken_constraint(requests_of([row for probe in probes for row in probe.measured]), tier)


def _curve(estimate: Estimate, tier: SloTier) -> list[CurvePoint]:
    """The fitted share around the knee. Draws move the curve along the rate."""
    rates = estimate.rate * CURVE_FRACTIONS
    plain = estimate.plain
    if estimate.method == PLAIN or estimate.twin is None:
        middle = plain.share(rates, tier.attainment)
        drawn = plain.share_draws(rates, tier.attainment)
    else:
        middle = estimate.twin.share(rates)
        drawn = np.stack([estimate.twin.share(rates * estimate.rate / knee) for knee in estimate.draws])
    points = []
    for at, rate in enumerate(rates):
        low, high = interval(drawn[:, at])
        points.append(
            CurvePoint(
                rate=float(rate),
                attainment=float(middle[at]),
                low=min(low, float(middle[at])),
                high=max(high, float(middle[at])),
            )
        )
    return points


def _shape(outcome: SearchOutcome) -> ShapeKnee | None:
    probes = [probe for probe in outcome.probes if probe.kind == "open_loop" and probe.rate is not None]
    rates = np.array([probe.rate for probe in probes], dtype=float)
    p95 = np.array([percentile_with_failures(requests_of(probe.measured).ttft_s, 95) for probe in probes])
    rate = shape_knee(rates, p95) if len(probes) else None
    return None if rate is None else ShapeKnee(rate=rate, definition=DEFINITION)
