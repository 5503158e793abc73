"""What a search has found, in plain words."""

from __future__ import annotations

from loadtest.knee.result import KneeResult, SloRow, TierResult
from loadtest.report.chart import duration

LATENCY_WORDS = {"ttft": "first token", "tpot": "time per token", "e2el": "last token"}
CONSTRAINT_WORDS = {
    "ttft": "the time to the first token",
    "tpot": "the time per output token",
    "e2el": "the time to the last token",
    "failures": "failures",
}
NEAR = 1.1  # up to a tenth away, a probe says something about a rate
STATUS_WORDS = {
    "resolved": "settled",
    "unresolved": "not settled",
    "infeasible": "cannot be kept",
    "client_bound": "the load generator was the limit",
    "invalid": "INVALID",
}


def is_broken(result: KneeResult) -> bool:
    """Whether nothing in it may be used; of several promises, one that cannot be kept leaves the others."""
    if result.status == "infeasible":
        return all(tier.status == "infeasible" for tier in result.tiers)
    return result.status in ("invalid", "client_bound")


def headline(result: KneeResult) -> str:
    """Of each tier, where they differ and nothing spoils them all."""
    outcome = STATUS_WORDS[result.status]
    if result.status not in ("invalid", "client_bound") and len({tier.status for tier in result.tiers}) > 1:
        has_laws = len({tier.arrival_cv for tier in result.tiers}) > 1
        outcome = "; ".join(
            f"{tier.name}{f' at CV {tier.arrival_cv:g}' if has_laws else ''} {STATUS_WORDS[tier.status]}"
            for tier in result.tiers
        )
    return f"The latency knee of {result.model}: {outcome}"


def verdict(result: KneeResult) -> list[str]:
    """Sentences: of each tier, then of the whole."""
    lines = []
    if result.status == "invalid":
        lines.append("This measurement is INVALID: its numbers are shown, and should not be used.")
    if result.status == "client_bound":
        lines.append(
            "The load generator itself was the limit, not the server: there is no capacity to report. "
            "Give it "
            "more processes or another machine."
        )
    lines += [_tier_sentence(tier, result) for tier in result.tiers]
    if result.shape_knee is not None:
        knee = result.shape_knee
        lines.append(
            f"The latency turns up at about {knee.rate:.3g} requests/s ({knee.definition}). This shape "
            "knee is a "
            "first look and no capacity: nothing is promised at it."
        )
    if result.saturation_rate is not None:
        interval = ""
        if result.saturation_ci90 is not None:
            low, high = result.saturation_ci90
            interval = f" (90 % interval {low:.3g} to {high:.3g})"
        lines.append(
            f"Flooded, the server answered {result.saturation_rate:.3g} requests/s{interval}: more than "
            "it can do "
            "within any promise."
        )
    told = {reason for tier in result.tiers for reason in tier.reasons}
    lines += [_sentence(reason) for reason in result.reasons if reason not in told]
    return lines or ["Nothing was found."]


def share_text(share: float) -> str:
    percent = 100 * share
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.3g} %"


def slo_words(slo: SloRow) -> str:
    limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2el": slo.e2el_ms}
    written = [
        f"{LATENCY_WORDS[name]} ≤ {duration(limit / 1000)}"
        for name, limit in limits.items()
        if limit is not None
    ]
    return f"{100 * slo.attainment:.4g} % of all requests with {' and '.join(written)}"


def arrival_words(cv: float) -> str:
    if cv == 1:
        return "Poisson arrivals"
    return "evenly spaced arrivals" if cv == 0 else f"arrivals with a CV of {cv:g}"


def _tier_sentence(tier: TierResult, result: KneeResult) -> str:
    promise = f"{tier.name} ({slo_words(tier.slo)})"
    law = arrival_words(tier.arrival_cv)
    reasons = "".join(f" {_sentence(reason)}" for reason in tier.reasons)
    if tier.status == "infeasible":
        return f"{promise}: cannot be kept at any load, not even one request at a time.{reasons}"
    if tier.slo_capacity is None:
        bracket = _bracket(tier)
        return f"{promise}: no capacity was found under {law}{bracket}.{reasons}"
    capacity = tier.slo_capacity
    low, high = capacity.ci90
    opening = (
        "holds up to" if tier.status == "resolved" else f"is {STATUS_WORDS[tier.status]}; the estimate is"
    )
    binding = (
        f" What breaks first is {CONSTRAINT_WORDS.get(tier.binding_constraint, tier.binding_constraint)}."
        if tier.binding_constraint
        else ""
    )
    fraction = (
        f" That is {100 * tier.knee_fraction:.0f} % of what it answers when flooded."
        if tier.knee_fraction is not None
        else ""
    )
    confirmed = (
        " A pair of probes kept out of the fit confirms it."
        if tier.validated
        else " It was not confirmed by probes kept out of the fit."
    )
    bracket = _bracket(tier) if tier.status != "resolved" else ""
    beyond = beyond_probes(tier, result)
    if beyond is not None:
        reasons += f" {_sentence(beyond)}"
    return (
        f"{promise}: {opening} {capacity.rate:.3g} requests/s under {law}, with a 90 % interval of "
        f"{low:.3g} to "
        f"{high:.3g}{bracket}.{binding}{fraction}{confirmed}{reasons}"
    )


def beyond_probes(tier: TierResult, result: KneeResult) -> str | None:
    """Why the capacity is an extrapolation, if it is one: no probe was made so far up or down."""
    if tier.slo_capacity is None:
        return None
    rate = tier.slo_capacity.rate
    rates = [probe.rate for probe in result.probes if probe.rate is not None and probe.cv == tier.arrival_cv]
    if rates and not min(rates) / NEAR <= rate <= max(rates) * NEAR:
        return (
            f"mind that no probe was made near it: they were at {min(rates):.3g} to {max(rates):.3g} "
            "requests/s, and this is an extrapolation"
        )
    return None


def _bracket(tier: TierResult) -> str:
    parts = []
    if tier.feasible_max is not None:
        parts.append(f"clearly kept at {tier.feasible_max:.3g}/s")
    if tier.infeasible_min is not None:
        parts.append(f"clearly broken at {tier.infeasible_min:.3g}/s")
    return f" ({', '.join(parts)})" if parts else ""


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
