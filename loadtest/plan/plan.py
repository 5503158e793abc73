"""The plan: how many replicas, by what, how sure, and what changes if the load is not as measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadtest.plan.measurement import Measurement
from loadtest.plan.sizing import Headroom, Pooling, check_headroom, default_spare, replicas_for, survives_loss
from shared.errors import ConfigError

KV_LIMIT = 0.9  # of the cache: above, sequences are put back for lack of blocks
LONGER_OUTPUT = 1.25
SECONDS_PER_HOUR = 3600

Basis = Literal["measured", "computed", "not known"]


@dataclass(frozen=True, slots=True)
class Target:
    """What is planned for. Token counts are means of a request; None: as in the measurement."""

    rate: float  # peak, requests/s
    headroom: float = 0.2
    spare: int | None = None  # None: one, where there is more than one replica
    growth_per_s: float = 0.0
    replica_start_s: float = 0.0
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    kv_tokens: int | None = None  # that one replica's cache can hold
    price_per_hour: float | None = None  # of one replica


@dataclass(frozen=True, slots=True)
class Sizing:
    """By one resource. `num_replicas` is without spares; None: not known, or no number does, see `remark`."""

    resource: str
    unit: str
    demand: float | None
    per_replica: float | None
    num_replicas: int | None
    basis: Basis
    remark: str = ""
    is_impossible: bool = False


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The plan, were one thing different. The replicas include spares."""

    name: str
    capacity: float | None  # requests/s of one replica
    num_replicas: int | None
    basis: Basis
    remark: str


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    capacity_low: float
    num_gateways: int
    ttft_p50_s: float | None  # of the probe nearest to each gateway's share of the load
    ttft_p99_s: float | None


@dataclass(frozen=True, slots=True)
class Cost:
    replica_hours_per_million_output_tokens: float
    price_per_hour: float | None  # of all replicas
    price_per_million_output_tokens: float | None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    target: Target
    measurement: Measurement
    headroom: Headroom
    pooling: Pooling
    is_pooling_measured: bool
    sizings: Sequence[Sizing]
    binding: str  # resource of the sizing that asks for most
    num_needed: int
    num_spare: int
    survives_loss: bool
    sensitivities: Sequence[Sensitivity]
    gateway: GatewayPlan | None
    cost: Cost | None
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def num_replicas(self) -> int:
        return self.num_needed + self.num_spare

    @property
    def rate_per_replica(self) -> float:
        return self.target.rate / self.num_replicas

    @property
    def utilisation(self) -> float:
        """Of the lower end of the capacity, when all replicas run."""
        capacity = self.pooling.capacity(self.measurement.capacity.low, self.num_replicas)
        return self.target.rate / capacity


def make_plan(
    target: Target,
    measurement: Measurement,
    *,
    two_replicas: Measurement | None = None,
    gateway: Measurement | None = None,
    other_cvs: Sequence[Measurement] = (),
    warnings: Sequence[str] = (),
) -> CapacityPlan:
    """`other_cvs`: the promise under other arrival laws. Raises ConfigError if nothing carries the load."""
    if not target.rate > 0:
        raise ConfigError(f"must be above 0, got {target.rate:g}", "--target-rps")
    headroom = Headroom(target.headroom, target.growth_per_s, target.replica_start_s, target.rate)
    check_headroom(headroom)
    pooling = Pooling()
    if two_replicas is not None:
        pooling = Pooling(two_replicas.capacity.value / (2 * measurement.capacity.value))
    sizings = [
        _by_rate(target, measurement, headroom, pooling),
        *_by_tokens(target, measurement, headroom, pooling),
        _by_kv_memory(target, measurement, headroom),
    ]
    for sizing in sizings:
        if sizing.is_impossible:
            raise ConfigError(f"no number of replicas carries this load: {sizing.remark}", "--target-rps")
    known = [sizing for sizing in sizings if sizing.num_replicas is not None]
    binding = max(
        known, key=lambda sizing: sizing.num_replicas or 0
    )  # of equals the first: the rate is measured
    num_needed = binding.num_replicas or 1
    num_spare = default_spare(num_needed) if target.spare is None else target.spare
    low = measurement.capacity.low
    return CapacityPlan(
        target=target,
        measurement=measurement,
        headroom=headroom,
        pooling=pooling,
        is_pooling_measured=two_replicas is not None,
        sizings=sizings,
        binding=binding.resource,
        num_needed=num_needed,
        num_spare=num_spare,
        survives_loss=survives_loss(target.rate, low, num_needed + num_spare, pooling),
        sensitivities=_sensitivities(target, measurement, headroom, pooling, other_cvs),
        gateway=None if gateway is None else _gateway_plan(target, gateway, headroom),
        cost=_cost(target, measurement, num_needed + num_spare),
        warnings=list(warnings),
    )


def _by_rate(target: Target, measured: Measurement, headroom: Headroom, pooling: Pooling) -> Sizing:
    low = measured.capacity.low
    return _sizing(
        "rate", "requests/s", target.rate, low, headroom, pooling, "measured", "lower end of the interval"
    )


def _by_tokens(target: Target, measured: Measurement, headroom: Headroom, pooling: Pooling) -> list[Sizing]:
    """Each kind of token as if it alone were the work, measured by what one replica does at its capacity."""
    sizings = []
    for resource, wanted, mean in (
        ("prompt tokens", target.prompt_tokens, measured.prompt_tokens),
        ("output tokens", target.output_tokens, measured.output_tokens),
    ):
        if mean is None:
            sizings.append(
                Sizing(
                    resource, "tokens/s", None, None, None, "not known", "the server reported no token counts"
                )
            )
            continue
        is_as_measured = wanted is None
        remark = (
            f"{mean:.4g} tokens per request, as measured"
            if is_as_measured
            else f"{wanted:.4g} tokens per request instead of the measured {mean:.4g}"
        )
        demand = target.rate * (mean if wanted is None else wanted)
        sizings.append(
            _sizing(
                resource, "tokens/s", demand, measured.capacity.low * mean, headroom, pooling,
                "measured" if is_as_measured else "computed", remark,
            )
        )  # fmt: skip
    return sizings


def _by_kv_memory(target: Target, measured: Measurement, headroom: Headroom) -> Sizing:
    """The fewest replicas whose caches stay below `KV_LIMIT` at their share of the load, in peaks as well.

    Headroom lies in the load here: each share may grow by it.
    """
    longer = _longer(target, measured)
    if measured.kv_usage is not None:
        figure, limit, unit, basis = measured.kv_usage, KV_LIMIT, "of the cache", "as the server reported it"
    elif target.kv_tokens is not None and measured.held_tokens is not None:
        figure, limit, unit = measured.held_tokens, KV_LIMIT * target.kv_tokens, "tokens"
        basis = "tokens held, as the client counted them"
    else:
        return Sizing(
            "KV memory", "of the cache", None, None, None, "not known",
            "the server did not report its KV use; --kv-tokens says how many tokens its cache holds",
        )  # fmt: skip

    def demand(num_replicas: int) -> float:
        return figure.at(target.rate / (1 - headroom.used) / num_replicas) * longer

    # Ends: below the lowest probe, memory in use falls in proportion to the rate.
    number = next(number for number in itertools.count(1) if demand(number) <= limit)
    at_capacity = figure.at(measured.capacity.low) * longer
    remark = f"{at_capacity:.3g} {unit} at the capacity of one, {basis}; at most {limit:.3g}"
    return Sizing(
        "KV memory", unit, demand(number), limit, number, "measured" if longer == 1 else "computed", remark
    )


def _longer(target: Target, measured: Measurement) -> float:
    """How much more memory a request takes than a measured one: by its prompt and half of its answer."""
    if measured.prompt_tokens is None or measured.output_tokens is None:
        return 1.0
    prompt = measured.prompt_tokens if target.prompt_tokens is None else target.prompt_tokens
    output = measured.output_tokens if target.output_tokens is None else target.output_tokens
    longer = (prompt + output / 2) / (measured.prompt_tokens + measured.output_tokens / 2)
    # Longer answers also stay for longer.
    return longer * max(1.0, output / measured.output_tokens)


def _sizing(
    resource: str,
    unit: str,
    demand: float,
    per_replica: float,
    headroom: Headroom,
    pooling: Pooling,
    basis: Basis,
    remark: str,
) -> Sizing:
    number = replicas_for(demand, per_replica, headroom.used, pooling)
    if number is None:
        remark = (
            f"replicas stand in each other's way (two do {pooling.of_two:.0%} of twice what one does): with "
            f"{headroom.used:.0%} of headroom all of them together stay below {demand:.4g} {unit}"
        )
    return Sizing(resource, unit, demand, per_replica, number, basis, remark, is_impossible=number is None)


def _sensitivities(
    target: Target,
    measured: Measurement,
    headroom: Headroom,
    pooling: Pooling,
    other_cvs: Sequence[Measurement],
) -> list[Sensitivity]:
    low = measured.capacity.low

    def row(name: str, capacity: float, basis: Basis, remark: str) -> Sensitivity:
        number = replicas_for(target.rate, capacity, headroom.used, pooling)
        if number is not None:
            number += default_spare(number) if target.spare is None else target.spare
        return Sensitivity(name, capacity, number, basis, remark)

    own_cv = measured.tier.arrival_cv
    by_cv = {one.tier.arrival_cv: one for one in (measured, *other_cvs)}
    rows = [
        row(
            f"arrivals with CV {cv:g}", one.capacity.low, "measured",
            "this plan" if cv == own_cv else "lower end of its own interval",
        )
        for cv, one in sorted(by_cv.items())
    ]  # fmt: skip
    rows += [
        Sensitivity(
            f"arrivals with CV {cv:g}", None, None, "not known", f"not measured: headrace knee --cv {cv:g}"
        )
        for cv in (1.0, 2.0)
        if cv not in by_cv
    ]
    hits = measured.prefix_hit_share
    if hits is None:
        rows.append(
            Sensitivity(
                "prefix hits 0 %", None, None, "not known", "the server did not report its prefix cache"
            )
        )
    else:
        remark = (
            f"{hits:.0%} of the prompt tokens were hits; assumes that a request's work is its prompt "
            "alone, which is the "
            "worst case"
        )
        rows.append(
            row("prefix hits 0 %", low * (1 - hits), "computed", remark)
            if hits < 1
            else Sensitivity("prefix hits 0 %", None, None, "not known", "all prompt tokens were hits")
        )
    rows.append(
        row(
            f"output +{LONGER_OUTPUT - 1:.0%}", low / LONGER_OUTPUT, "computed",
            "assumes that a request's work is its output alone, which is the worst case",
        )
    )  # fmt: skip
    rows.append(
        row("upper end of the interval", measured.capacity.high, "measured", "what a plan by luck would say")
    )
    return rows


def _gateway_plan(target: Target, gateway: Measurement, headroom: Headroom) -> GatewayPlan:
    from loadtest.knee.observations import percentile_with_failures
    from loadtest.report.rate_curves import rate_points

    number = replicas_for(target.rate, gateway.capacity.low, headroom.used)
    assert number is not None, "without contention some number always does"
    number += default_spare(number) if target.spare is None else target.spare
    points = [point for point in rate_points(gateway.result.probes) if point.cv == gateway.tier.arrival_cv]
    p50 = p99 = None
    if points:
        share = target.rate / number
        nearest = min(points, key=lambda point: abs(point.rate - share))
        p50, p99 = (percentile_with_failures(nearest.requests.ttft_s, percent) for percent in (50.0, 99.0))
    return GatewayPlan(gateway.capacity.low, number, p50, p99)


def _cost(target: Target, measured: Measurement, num_replicas: int) -> Cost | None:
    output = measured.output_tokens if target.output_tokens is None else target.output_tokens
    if not output:
        return None
    millions_per_hour = target.rate * output * SECONDS_PER_HOUR / 1e6
    price = None if target.price_per_hour is None else target.price_per_hour * num_replicas
    return Cost(num_replicas / millions_per_hour, price, None if price is None else price / millions_per_hour)
