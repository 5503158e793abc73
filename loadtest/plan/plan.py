"""The plan: how many replicas, by what, how sure, and what changes if the load is not as measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from loadtest.compare import ratio_interval
from loadtest.plan.measurement import Interval, Measurement
from loadtest.plan.sizing import (
    MAX_REPLICAS,
    Headroom,
    Pooling,
    check_headroom,
    default_spare,
    replicas_for,
    survives_loss,
)
from shared.errors import ConfigError

KV_MEMORY = "KV memory"
KV_LIMIT = 0.9  # of the cache: above, sequences are put back for lack of blocks
LONGER_OUTPUT = 1.25
MAX_TARGET_RATE = 1e6  # requests/s: beyond, it is a slip of the keyboard
MAX_POOLING = 1.1  # more than a shared queue can gain: rather two files that do not belong together
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
    """The plan, were one thing different: sized by all that the plan is. The replicas include spares."""

    name: str
    capacity: float | None  # requests/s of one replica, by what then binds
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
    pooling_estimate: Interval | None  # of `pooling.of_two`, with its 90 % interval; None: not measured
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
        """Of the lower end of the capacity, when all replicas run, by what binds then."""
        return max(
            one.demand / _pooling_of(one, self.pooling).capacity(one.per_replica, self.num_replicas)
            for one in self.sizings
            if one.demand is not None and one.per_replica is not None
        )


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
    if not 0 < target.rate <= MAX_TARGET_RATE:
        raise ConfigError(
            f"must be above 0 and at most {MAX_TARGET_RATE:,.0f}, got {target.rate:g}", "--target-rps"
        )
    headroom = Headroom(target.headroom, target.growth_per_s, target.replica_start_s, target.rate)
    check_headroom(headroom)
    warnings = list(warnings)
    estimate = None if two_replicas is None else _pooling_estimate(measurement, two_replicas)
    pooling = Pooling() if estimate is None else _fair_pooling(estimate)
    if estimate is not None and estimate.value > MAX_POOLING:
        warnings.append(
            f"two replicas did {estimate.value:.0%} of twice what one did, which a shared queue does not "
            "explain: is the first file of one replica and the second of two? "
            f"Planned with {pooling.of_two:.0%}"
        )
    sizings = _sizings(target, measurement, headroom, pooling)
    for sizing in sizings:
        if sizing.is_impossible:
            raise ConfigError(f"no number of replicas carries this load: {sizing.remark}", "--target-rps")
    binding = _binding(sizings)
    num_needed = binding.num_replicas or 1
    num_spare = default_spare(num_needed) if target.spare is None else target.spare
    return CapacityPlan(
        target=target,
        measurement=measurement,
        headroom=headroom,
        pooling=pooling,
        pooling_estimate=estimate,
        sizings=sizings,
        binding=binding.resource,
        num_needed=num_needed,
        num_spare=num_spare,
        survives_loss=all(
            survives_loss(one.demand, one.per_replica, num_needed + num_spare, _pooling_of(one, pooling))
            for one in sizings
            if one.demand is not None and one.per_replica is not None
        ),
        sensitivities=_sensitivities(target, measurement, headroom, pooling, other_cvs),
        gateway=None if gateway is None else _gateway_plan(target, gateway, headroom),
        cost=_cost(target, measurement, num_needed + num_spare),
        warnings=warnings,
    )


def _pooling_estimate(one: Measurement, two: Measurement) -> Interval:
    ends = [(of.capacity.low, of.capacity.high) for of in (one, two)]
    low, high = ratio_interval(one.capacity.value, ends[0], two.capacity.value, ends[1])
    return Interval(low / 2, two.capacity.value / (2 * one.capacity.value), high / 2)


def _fair_pooling(estimate: Interval) -> Pooling:
    """Only what the measurement shows: an interval that holds 100 % shows neither hindrance nor gain.

    Stretched to many replicas, what is only the scatter of two measurements would become a multiple.
    """
    if estimate.high < 1:
        return Pooling(estimate.value)
    return Pooling(min(MAX_POOLING, max(1.0, estimate.low)))


def _sizings(target: Target, measured: Measurement, headroom: Headroom, pooling: Pooling) -> list[Sizing]:
    return [
        _by_rate(target, measured, headroom, pooling),
        *_by_tokens(target, measured, headroom, pooling),
        _by_kv_memory(target, measured, headroom),
    ]


def _pooling_of(sizing: Sizing, pooling: Pooling) -> Pooling:
    """Replicas do not share memory."""
    return Pooling() if sizing.resource == KV_MEMORY else pooling


def _binding(sizings: Sequence[Sizing]) -> Sizing:
    """Of equals the first: the rate is measured."""
    return max(sizings, key=lambda sizing: sizing.num_replicas or 0)


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
    """As a rate: that at which one cache is full to `KV_LIMIT` in peaks. Replicas do not share memory."""
    longer = _longer(target, measured)
    if measured.kv_usage is not None:
        figure, limit, unit, source = measured.kv_usage, KV_LIMIT, "of the cache", "as the server reported it"
    elif target.kv_tokens is not None and measured.held_tokens is not None:
        figure, limit, unit = measured.held_tokens, KV_LIMIT * target.kv_tokens, "tokens"
        source = "tokens held, as the client counted them"
    else:
        return Sizing(
            KV_MEMORY, "requests/s", None, None, None, "not known",
            "the server did not report its KV use; --kv-tokens says how many tokens its cache holds",
        )  # fmt: skip
    at_capacity = figure.at(measured.capacity.low) * longer
    full_at = figure.rate_reaching(limit / longer)
    number = replicas_for(target.rate, full_at, headroom.used)
    remark = (
        f"the rate at which {limit:.4g} {unit} are in use, {source}; {at_capacity:.3g} at "
        f"{measured.capacity.low:.4g} requests/s"
        if number is not None
        else f"at this load the caches fill in {MAX_REPLICAS:,} replicas as well"
    )
    return Sizing(
        KV_MEMORY, "requests/s", target.rate, full_at if full_at < math.inf else None, number,
        "measured" if longer == 1 else "computed", remark, is_impossible=number is None,
    )  # fmt: skip


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
    if number is None and pooling.of_two >= 1:
        remark = f"{MAX_REPLICAS:,} of them stay below {demand:.4g} {unit}"
    elif number is None:
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
    """Capacities are changed as a whole: an interval of one value is what then is known for sure."""
    capacity = measured.capacity

    def row(
        name: str, basis: Basis, remark: str, one: Measurement = measured, wanted: Target = target
    ) -> Sensitivity:
        sizings = _sizings(wanted, one, headroom, pooling)
        impossible = next((sizing for sizing in sizings if sizing.is_impossible), None)
        if impossible is not None:
            return Sensitivity(name, None, None, basis, f"no number of replicas does: {impossible.remark}")
        binding = _binding(sizings)
        if binding.resource != "rate":
            remark += f"; {binding.resource} binds"
        of_one = binding.per_replica
        if of_one is not None and binding.demand:
            of_one *= wanted.rate / binding.demand
        number = binding.num_replicas or 1
        number += default_spare(number) if target.spare is None else target.spare
        return Sensitivity(name, of_one, number, basis, remark)

    def at(rate: float) -> Measurement:
        return replace(measured, capacity=Interval(rate, rate, rate))

    own_cv = measured.tier.arrival_cv
    by_cv = {one.tier.arrival_cv: one for one in (measured, *other_cvs)}
    rows = [
        row(
            f"arrivals with CV {cv:g}", "measured",
            "this plan" if cv == own_cv else "lower end of its own interval", one,
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
            row("prefix hits 0 %", "computed", remark, at(capacity.low * (1 - hits)))
            if hits < 1
            else Sensitivity("prefix hits 0 %", None, None, "not known", "all prompt tokens were hits")
        )
    output = measured.output_tokens if target.output_tokens is None else target.output_tokens
    assumption = "assumes that a request's work is its output alone, which is the worst case"
    longer = f"output +{LONGER_OUTPUT - 1:.0%}"
    if measured.output_tokens is None or output is None:
        rows.append(row(longer, "computed", assumption, at(capacity.low / LONGER_OUTPUT)))
    else:
        wanted = replace(target, output_tokens=output * LONGER_OUTPUT)
        rows.append(row(longer, "computed", assumption, wanted=wanted))
    rows.append(
        row("upper end of the interval", "measured", "what a plan by luck would say", at(capacity.high))
    )
    return rows


def _gateway_plan(target: Target, gateway: Measurement, headroom: Headroom) -> GatewayPlan:
    from loadtest.knee.observations import percentile_with_failures
    from loadtest.report.rate_curves import rate_points

    number = replicas_for(target.rate, gateway.capacity.low, headroom.used)
    if number is None:
        raise ConfigError(
            f"more than {MAX_REPLICAS:,} gateways of {gateway.capacity.low:.4g} requests/s would be needed",
            "--gateway-knee",
        )
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
