"""A search's result in plain words, for the terminal."""

from __future__ import annotations

from loadtest.knee.result import KneeResult, SloRow, TierResult

METHODS = {
    "plain": "fitted to the probes alone",
    "queue_twin": "with a queue model that was fed with the same arrivals",
    "step_twin": "with a model of the engine's steps that was fed with the same arrivals",
}


def text_of(result: KneeResult) -> str:
    lines = [f"{result.model} at {result.url}", ""]
    for tier in result.tiers:
        lines += [*_tier_lines(tier, several_laws=len({one.arrival_cv for one in result.tiers}) > 1), ""]
    if not result.tiers:
        lines += [_shape_line(result), ""]
    if result.saturation_rate is not None:
        lines.append(f"Saturated, the server completes {result.saturation_rate:.3g} requests/s.")
    lines += [f"{'! ' if not reason.startswith('note:') else ''}{reason}" for reason in result.reasons]
    lines += ["", "Conditions", *_validity_lines(result)]
    if result.not_reported_by_server:
        lines += ["", f"The server does not report: {', '.join(result.not_reported_by_server)}."]
    spent = ", ".join(f"{phase.name} {phase.seconds:.0f} s" for phase in result.phases)
    lines += ["", f"{result.seconds_spent:.0f} of {result.budget_s:.0f} s spent: {spent}."]
    return "\n".join(lines)


def slo_text(slo: SloRow) -> str:
    limits = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "E2EL": slo.e2el_ms}
    told = ", ".join(f"{name} ≤ {limit:.4g} ms" for name, limit in limits.items() if limit is not None)
    return f"{100 * slo.attainment:.4g} % of requests with {told}"


def _tier_lines(tier: TierResult, *, several_laws: bool) -> list[str]:
    law = {1.0: "Poisson arrivals", 0.0: "an even pace"}.get(
        tier.arrival_cv, f"arrivals of CV {tier.arrival_cv:g}"
    )
    heading = f"{tier.name}: {slo_text(tier.slo)}; {law}"
    lines = [heading, f"  {_verdict(tier)}"]
    capacity = tier.slo_capacity
    if capacity is not None:
        worth = ""
        if capacity.n_eff is not None and capacity.design_effect is not None:
            worth = (
                f"; the requests were worth {capacity.n_eff:.0f} independent ones "
                f"(design effect {capacity.design_effect:.0f})"
            )
        lines.append(f"  {METHODS.get(capacity.method, capacity.method)}{worth}")
    bounds = []
    if tier.feasible_max is not None:
        bounds.append(f"clearly kept at {tier.feasible_max:.3g}")
    if tier.infeasible_min is not None:
        bounds.append(f"clearly broken at {tier.infeasible_min:.3g}")
    if bounds:
        lines.append(f"  {', '.join(bounds)} requests/s")
    if tier.binding_constraint is not None:
        lines.append(f"  what breaks first: {tier.binding_constraint}")
    lines.append(f"  {'validated' if tier.validated else 'not validated'} by probes kept out of the fit")
    lines += [f"  - {reason}" for reason in tier.reasons]
    return lines


def _verdict(tier: TierResult) -> str:
    capacity = tier.slo_capacity
    if tier.status == "infeasible":
        return "INFEASIBLE at any load."
    if tier.status == "client_bound":
        return "CLIENT-BOUND: no figure, the load generator is too slow."
    if capacity is None:
        return f"{tier.status.upper()}: no figure."
    low, high = capacity.ci90
    words = {"resolved": "", "unresolved": "UNRESOLVED, so far ", "invalid": "INVALID, do not use: "}
    word = words.get(tier.status, "")
    if tier.open_side == "above" and tier.status != "resolved":
        return f"{word}more than {tier.feasible_max or low:.3g} requests/s"
    if tier.open_side == "below" and tier.status != "resolved":
        return f"{word}less than {tier.infeasible_min or high:.3g} requests/s"
    figure = f"{capacity.rate:.3g} requests/s (90 % interval {low:.3g} to {high:.3g})"
    if tier.knee_fraction is not None:
        figure += f", {100 * tier.knee_fraction:.0f} % of saturation"
    return f"{word}{figure}"


def _shape_line(result: KneeResult) -> str:
    if result.shape_knee is None:
        return "No shape knee was found."
    return f"Shape knee at {result.shape_knee.rate:.3g} requests/s: {result.shape_knee.definition}."


def _validity_lines(result: KneeResult) -> list[str]:
    lines = []
    for check in result.validity:
        value = "–" if check.value is None else f"{check.value:.3g}"
        limit = "–" if check.limit is None else f"{check.limit:.3g}"
        verdict = "ok    " if check.passed else "BROKEN"
        reason = f"  {check.reason}" if check.reason else ""
        lines.append(f"  {verdict} {check.check:<22} {value:>9}  (limit {limit}){reason}")
    return lines
