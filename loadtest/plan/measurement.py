"""What a search says about one replica, as a plan needs it. What was not measured is None."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.knee.probe import Probe, ProbedRequest, ServerSample
from loadtest.knee.result import KneeResult, TierResult
from shared.errors import ConfigError

UNUSABLE = {
    "invalid": "it is INVALID",
    "client_bound": "the load generator was its limit, not the server",
    "infeasible": "the promise cannot be kept at any load",
}
KV_PERCENT = 99.0  # memory must do for the peaks


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class RateFigure:
    """A figure of the server or the client in each open-loop probe, by rate."""

    rates: Sequence[float]
    values: Sequence[float]

    def at(self, rate: float) -> float:
        """Between probes; below the lowest and above the highest in proportion to the rate."""
        if rate <= self.rates[0]:
            return self.values[0] * rate / self.rates[0]
        if rate >= self.rates[-1]:
            return self.values[-1] * rate / self.rates[-1]
        return float(np.interp(rate, self.rates, self.values))

    def rate_reaching(self, limit: float) -> float:
        """The lowest rate above which the figure exceeds the limit for the first time; infinite if none."""
        rate = value = 0.0
        for next_rate, next_value in zip(self.rates, self.values, strict=True):
            if next_value > limit:
                return rate + (next_rate - rate) * (limit - value) / (next_value - value)
            rate, value = next_rate, next_value
        return rate * (limit / value) if value > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Measurement:
    """Of one replica, under one promise and one arrival law."""

    result: KneeResult
    tier: TierResult
    capacity: Interval  # requests/s
    prompt_tokens: float | None  # mean of a request
    output_tokens: float | None
    prefix_hit_share: float | None
    running: RateFigure | None  # mean; as the server says
    waiting: RateFigure | None
    in_flight: RateFigure | None  # mean; as the client saw it
    kv_usage: RateFigure | None  # 99th percentile over time
    held_tokens: (
        RateFigure | None
    )  # the same of prompts and answers between first and last token, by the client


def choose_tier(result: KneeResult, name: str | None, cv: float | None) -> TierResult:
    """The first tier unless named, under the first arrival law unless given. Raises ConfigError."""
    if not result.tiers:
        raise ConfigError(
            "the search had no SLO: without a promise there is no capacity to plan with", "--slo"
        )
    name = name or result.tiers[0].name
    of_name = [tier for tier in result.tiers if tier.name == name]
    if not of_name:
        known = ", ".join(dict.fromkeys(tier.name for tier in result.tiers))
        raise ConfigError(f"there is no tier {name!r} in the result, but: {known}", "--tier")
    cv = of_name[0].arrival_cv if cv is None else cv
    chosen = next((tier for tier in of_name if math.isclose(tier.arrival_cv, cv, rel_tol=0.01)), None)
    if chosen is None:
        known = ", ".join(f"{tier.arrival_cv:g}" for tier in of_name)
        raise ConfigError(
            f"the knee was not measured at CV {cv:g}, but at {known}: burstiness costs capacity, and by "
            "how much is "
            "not to be guessed",
            "--cv",
        )
    return chosen


def why_unusable(result: KneeResult, tier: TierResult) -> str | None:
    """Why nothing should be planned from it; None: nothing speaks against it."""
    # Of the whole only what spoils every tier: that one promise cannot be kept says nothing of another.
    for status in (result.status, tier.status) if result.status != "infeasible" else (tier.status,):
        if status in UNUSABLE:
            of_others = {reason for one in result.tiers if one is not tier for reason in one.reasons}
            of_whole = [reason for reason in result.reasons if reason not in of_others]
            reasons = "; ".join(dict.fromkeys([*of_whole, *tier.reasons]))
            return f"{UNUSABLE[status]}{f': {reasons}' if reasons else ''}"
    capacity = tier.slo_capacity
    if capacity is None:
        return "the search ended without a capacity"
    low, high = capacity.ci90
    if not (0 < low <= high < math.inf):
        return "the search ended without an interval"
    return None


def has_capacity(tier: TierResult) -> bool:
    """Whether there is a number to plan with at all, be it a good one or not."""
    capacity = tier.slo_capacity
    return capacity is not None and 0 < capacity.rate < math.inf and 0 < capacity.ci90[0] < math.inf


def measure(result: KneeResult, tier: TierResult) -> Measurement:
    """Raises ConfigError if there is no capacity at all, which not even --force can help."""
    capacity = tier.slo_capacity
    if capacity is None or not has_capacity(tier):
        raise ConfigError(f"tier {tier.name!r} has no capacity to plan with, whatever the reason")
    probes = [
        probe
        for probe in result.probes
        if probe.rate is not None
        and probe.cv is not None
        and math.isclose(probe.cv, tier.arrival_cv, rel_tol=0.01)
    ]
    answered = [one for probe in probes for one in probe.measured if not one.failed and not one.cut_off]
    low, high = capacity.ci90
    return Measurement(
        result=result,
        tier=tier,
        capacity=Interval(low, capacity.rate, high),
        # A mean of nothing at all is a server that does not count.
        prompt_tokens=_mean([one.num_prompt_tokens for one in answered]) or None,
        output_tokens=_mean([one.num_output_tokens for one in answered]) or None,
        prefix_hit_share=_hit_share(probes),
        running=_figure(probes, lambda probe: _mean([one.running for one in _measured_samples(probe)])),
        waiting=_figure(probes, lambda probe: _mean([one.waiting for one in _measured_samples(probe)])),
        in_flight=_figure(probes, _mean_in_flight),
        kv_usage=_figure(probes, lambda probe: _peak([one.kv_usage for one in _measured_samples(probe)])),
        held_tokens=_figure(probes, _peak_held_tokens),
    )


def _figure(probes: Sequence[Probe], of_probe: Callable[[Probe], float | None]) -> RateFigure | None:
    pairs = [(probe.rate, of_probe(probe)) for probe in sorted(probes, key=lambda probe: probe.rate or 0.0)]
    known = [(rate, value) for rate, value in pairs if rate and value is not None]
    if not known:
        return None
    # Probes at nearly one rate scatter; the mean of neighbours is what a line may go through.
    grouped: list[list[tuple[float, float]]] = []
    for rate, value in known:
        if grouped and rate <= grouped[-1][0][0] * 1.03:
            grouped[-1].append((rate, value))
        else:
            grouped.append([(rate, value)])
    return RateFigure(
        [sum(rate for rate, _ in some) / len(some) for some in grouped],
        [sum(value for _, value in some) / len(some) for some in grouped],
    )


def _measured_samples(probe: Probe) -> list[ServerSample]:
    return [sample for sample in probe.samples if probe.warm_cut_s <= sample.at_s < probe.end_s]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _peak(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, KV_PERCENT)) if known else None


def _hit_share(probes: Sequence[Probe]) -> float | None:
    queries = hits = 0.0
    for probe in probes:
        samples = [
            one for one in probe.samples if one.prefix_queries is not None and one.prefix_hits is not None
        ]
        if len(samples) > 1:
            first, last = samples[0], samples[-1]
            assert first.prefix_queries is not None and first.prefix_hits is not None, "see above"  # noqa: PT018
            assert last.prefix_queries is not None and last.prefix_hits is not None, "see above"  # noqa: PT018
            queries += last.prefix_queries - first.prefix_queries
            hits += last.prefix_hits - first.prefix_hits
    return hits / queries if queries > 0 else None


def _mean_in_flight(probe: Probe) -> float | None:
    window_s = probe.end_s - probe.warm_cut_s
    if window_s <= 0 or not probe.requests:
        return None
    inside = 0.0
    for one in probe.requests:
        if one.sent_s is not None:
            begin, end = max(one.sent_s, probe.warm_cut_s), min(_end(one, probe), probe.end_s)
            inside += max(0.0, end - begin)
    return inside / window_s


def _peak_held_tokens(probe: Probe) -> float | None:
    """Tokens of requests between their first and their last token, second by second.

    The prompt counts whole, the answer as far as it has come. Prompts that are still being computed are not
    in it, and prefixes that requests share are in it more than once.
    """
    moments = np.arange(probe.warm_cut_s, probe.end_s, 1.0)
    held = np.zeros(len(moments))
    for one in probe.requests:
        if (
            one.first_token_s is None
            or one.end_s is None
            or one.num_prompt_tokens is None
            or not one.num_output_tokens
        ):
            continue
        inside = (moments >= one.first_token_s) & (moments < one.end_s)
        share = (moments[inside] - one.first_token_s) / max(1e-9, one.end_s - one.first_token_s)
        held[inside] += one.num_prompt_tokens + share * one.num_output_tokens
    return float(np.percentile(held, KV_PERCENT)) if held.any() else None


def _end(one: ProbedRequest, probe: Probe) -> float:
    return probe.drained_s if one.end_s is None else one.end_s
