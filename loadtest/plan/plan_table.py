"""A plan as it is printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadtest.plan.plan import CapacityPlan
from loadtest.report.chart import duration
from loadtest.report.words import arrival_words, slo_words

MARGIN = "  "


def plan_text(plan: CapacityPlan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: CapacityPlan) -> Iterator[str]:
    measured, target = plan.measurement, plan.target
    low, high = measured.capacity.low, measured.capacity.high
    yield f"{plan.num_replicas} replicas for {target.rate:g} requests/s" + (
        f" ({plan.num_needed} needed, {plan.num_spare} spare)" if plan.num_spare else ""
    )
    yield ""
    for warning in plan.warnings:
        yield f"WARNING: {warning}"
    yield (
        f"promise: {measured.tier.name}, {slo_words(measured.tier.slo)}, under "
        f"{arrival_words(measured.tier.arrival_cv)}"
    )
    yield (
        f"one replica: {measured.capacity.value:.4g} requests/s, 90 % interval {low:.4g} to {high:.4g}; "
        f"planned with {low:.4g}"
    )
    yield _headroom_line(plan)
    yield _pooling_line(plan)
    yield (
        f"at the peak each replica gets {plan.rate_per_replica:.4g} requests/s, "
        f"{plan.utilisation:.0%} of its capacity"
    )
    yield _loss_line(plan)
    yield ""
    yield "How many are needed, without spares:"
    yield from _columns(
        ["by", "demand", "of one replica", "replicas", "", ""],
        [
            [
                f"{sizing.resource}{' (binding)' if sizing.resource == plan.binding else ''}",
                _amount(sizing.demand, sizing.unit),
                _amount(sizing.per_replica, sizing.unit),
                "–" if sizing.num_replicas is None else str(sizing.num_replicas),
                sizing.basis,
                sizing.remark,
            ]
            for sizing in plan.sizings
        ],
    )
    yield ""
    yield "What if, spares included:"
    yield from _columns(
        ["", "of one replica", "replicas", "", ""],
        [
            [
                row.name,
                _amount(row.capacity, "requests/s"),
                "–" if row.num_replicas is None else str(row.num_replicas),
                row.basis,
                row.remark,
            ]
            for row in plan.sensitivities
        ],
    )
    if plan.gateway is not None:
        yield ""
        gateway = plan.gateway
        yield (
            f"gateways: {gateway.num_gateways}, each for up to {gateway.capacity_low:.4g} requests/s; "
            "to the first token "
            f"in its own measurement p50 {duration(_or_nan(gateway.ttft_p50_s))}, p99 "
            f"{duration(_or_nan(gateway.ttft_p99_s))}, "
            "what stood for the engine included"
        )
    if plan.cost is not None:
        yield ""
        yield (
            f"{plan.cost.replica_hours_per_million_output_tokens:.3g} replica-hours per million "
            "output tokens at the peak"
        )
        if plan.cost.price_per_million_output_tokens is not None:
            yield (
                f"{plan.cost.price_per_hour:.4g} per hour, "
                f"{plan.cost.price_per_million_output_tokens:.3g} per million "
                "output tokens"
            )


def _headroom_line(plan: CapacityPlan) -> str:
    headroom = plan.headroom
    growth = (
        f"{headroom.needed:.1%} needed, as the load grows by {headroom.growth_per_s:g} requests/s each "
        "second of the "
        f"{headroom.replica_start_s:g} s in which a replica starts"
        if headroom.growth_per_s and headroom.replica_start_s
        else "what growth needs is not known without --growth-per-s and --replica-start"
    )
    return f"headroom: {headroom.used:.1%} ({headroom.asked:.1%} asked for; {growth})"


def _pooling_line(plan: CapacityPlan) -> str:
    estimate, used = plan.pooling_estimate, plan.pooling.of_two
    if estimate is None:
        return "pooling: taken as 100 %, as no two replicas were measured (--two-replicas)"
    taken = (
        ", which holds 100 %: taken as 100 %"
        if used == 1
        else ""
        if used == estimate.value
        else f"; planned with {used:.1%}"
    )
    return (
        f"pooling: two replicas do {estimate.value:.1%} of twice what one does, 90 % interval "
        f"{estimate.low:.1%} to {estimate.high:.1%}{taken}"
    )


def _loss_line(plan: CapacityPlan) -> str:
    if plan.num_replicas == 1:
        return "loss of a replica: FAIL, there is only one"
    left = plan.target.rate / (plan.num_replicas - 1)
    outcome = "pass" if plan.survives_loss else "FAIL"
    return f"loss of a replica: {outcome}, the others get {left:.4g} requests/s each, without headroom"


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g} {unit}" if abs(value) < 1e4 else f"{value:,.0f} {unit}"


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    for row in [head, *rows]:
        yield MARGIN + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
