"""What differs between two results of one kind: two searches, or two runs of `bench serve`.

Every difference comes with a ratio and its 90 % interval. B is set against A: above 1 is more of it in B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from loadtest.knee.bootstrap import block_weights, interval
from loadtest.knee.observations import Floats, Requests, percentile_with_failures, requests_of
from loadtest.knee.result import KneeResult, SloCapacity
from loadtest.report.bench_result import BenchRun
from loadtest.report.interval import block_numbers
from loadtest.report.rate_curves import ALIKE, PERCENTS, RatePoint, rate_points
from shared.errors import ConfigError

NUM_DRAWS = 400
MIN_REQUESTS = 20  # fewer tell no percentile
UNSHARED = ("seed", "nonce", "num_distinct_prompts")  # of a workload: other words, no other work
NAMES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "time to the last token"}

Verdict = Literal["more", "less", "no difference shown", "no interval"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both. The interval is that of the ratio; None where the files hold too little for one."""

    figure: str
    unit: str
    a: float
    b: float
    ratio_ci90: tuple[float, float] | None
    design_effect: float | None = None  # requests per independent one, of both together
    is_better_when_less: bool = True
    remark: str = ""

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def ratio(self) -> float:
        return self.b / self.a if self.a else math.nan

    @property
    def verdict(self) -> Verdict:
        if self.ratio_ci90 is None:
            return "no interval"
        low, high = self.ratio_ci90
        return "more" if low > 1 else "less" if high < 1 else "no difference shown"


@dataclass(frozen=True, slots=True)
class Comparison:
    differences: Sequence[Difference]
    verdict: Sequence[str]
    forced: Sequence[str] = field(default_factory=list)  # why the two should not be compared, and were


def compare_searches(a: KneeResult, b: KneeResult, *, force: bool = False) -> Comparison:
    """Raises ConfigError, without `force`, if the two did not measure the same thing."""
    _check_capacities(a, "A")
    _check_capacities(b, "B")
    forced = _refuse([*_unlike_searches(a, b), *_unlike_workloads(a.workload, b.workload)], force)
    differences: list[Difference] = []
    sentences: list[str] = []
    for tier in a.tiers:
        other = next(
            (one for one in b.tiers if one.name == tier.name and one.arrival_cv == tier.arrival_cv), None
        )
        if other is None:
            continue
        law = f", CV {tier.arrival_cv:g}" if len({one.arrival_cv for one in a.tiers}) > 1 else ""
        name = f"capacity of {tier.name}{law}"
        if tier.slo_capacity is None or other.slo_capacity is None:
            missing = " and ".join(
                side for side, one in (("A", tier), ("B", other)) if one.slo_capacity is None
            )
            sentences.append(f"Cannot tell how the {name} differs: there is none in {missing}.")
            continue
        one = _capacity_difference(name, tier.slo_capacity, other.slo_capacity)
        differences.append(one)
        sentences.append(_capacity_sentence(one))
    if a.saturation_rate is not None and b.saturation_rate is not None:
        differences.append(
            Difference(
                "saturation rate", "req/s", a.saturation_rate, b.saturation_rate,
                _saturation_ratio(a, b),
                is_better_when_less=False,
            )
        )  # fmt: skip
    latencies = list(_unloaded_differences(a, b)) + list(_probe_differences(a, b))
    sentences += _called(latencies)
    for side, result in (("A", a), ("B", b)):
        if result.status != "resolved":
            sentences.append(
                f"Mind that {side} is {result.status}: {'; '.join(result.reasons) or 'see its report'}."
            )
    return Comparison([*differences, *latencies], sentences or ["Nothing could be compared."], forced)


def compare_runs(a: Sequence[BenchRun], b: Sequence[BenchRun], *, force: bool = False) -> Comparison:
    """Runs of both at the same load, in pairs. Raises ConfigError, without `force`, if they are unlike."""
    pairs = [(one, other) for one in a for other in b if _load(one) == _load(other)]
    reasons = []
    if not pairs:
        told = (", ".join(run.label for run in runs) for runs in (a, b))
        reasons.append("no run of one has the load of a run of the other: {} and {}".format(*told))
        pairs = list(zip(a, b, strict=False))
    for one, other in pairs:
        reasons += _unlike_runs(one, other)
    forced = _refuse(list(dict.fromkeys(reasons)), force)
    differences = [
        difference
        for one, other in pairs
        for difference in _run_differences(one, other, f", {one.label}" if len(pairs) > 1 else "")
    ]
    called = _called(differences)
    if not called:
        has_intervals = any(one.ratio_ci90 is not None for one in differences)
        called = [
            "No difference shows: every interval of a ratio holds 1."
            if has_intervals
            else "The files hold no single requests (--save-detailed), so there is no interval, and "
            "no verdict."
        ]
    return Comparison(differences, called, forced)


def ratio_interval(
    a: float, a_ci: tuple[float, float], b: float, b_ci: tuple[float, float]
) -> tuple[float, float]:
    """Of b / a, which are independent, from their own intervals: distances to the ends are added as squares,
    on a logarithmic scale and each side by itself (Zou and Donner, Statistics in Medicine 27, 2008)."""
    if min(a, b, *a_ci, *b_ci) <= 0 or not all(map(math.isfinite, (a, b, *a_ci, *b_ci))):
        return 0.0, math.inf
    middle = math.log(b / a)
    below = math.hypot(math.log(b / b_ci[0]), math.log(a_ci[1] / a))
    above = math.hypot(math.log(b_ci[1] / b), math.log(a / a_ci[0]))
    return math.exp(middle - below), math.exp(middle + above)


def _refuse(reasons: Sequence[str], force: bool) -> list[str]:
    if reasons and not force:
        raise ConfigError(
            f"these two are not to be compared: {'; '.join(reasons)} (--force does it all the same)"
        )
    return list(reasons)


def _unlike_searches(a: KneeResult, b: KneeResult) -> list[str]:
    reasons = []
    if [tier.slo for tier in a.tiers] != [tier.slo for tier in b.tiers]:
        reasons.append("their promises differ")
    cvs = [sorted({tier.arrival_cv for tier in one.tiers} or {one.arrival_cv}) for one in (a, b)]
    if cvs[0] != cvs[1]:
        told = [", ".join(f"{cv:g}" for cv in some) for some in cvs]
        reasons.append(f"their arrivals differ: CV {told[0]} and {told[1]}")
    return reasons


def _unlike_workloads(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    names = [name for name in dict.fromkeys([*a, *b]) if name not in UNSHARED and a.get(name) != b.get(name)]
    return [f"their workloads differ in {name}: {a.get(name)!r} and {b.get(name)!r}" for name in names]


def _unlike_runs(a: BenchRun, b: BenchRun) -> list[str]:
    reasons = _unlike_workloads(a.headrace.get("workload") or {}, b.headrace.get("workload") or {})
    for name in ("burstiness", "backend"):
        if a.values.get(name) != b.values.get(name):
            reasons.append(f"their {name} differs: {a.values.get(name)!r} and {b.values.get(name)!r}")
    if a.headrace.get("goodput_ms") != b.headrace.get("goodput_ms"):
        reasons.append("their limits for goodput differ")
    if a.counts_from_due != b.counts_from_due and a.probe is not None and b.probe is not None:
        reasons.append("one knows when requests were due, the other only when they were sent")
    return reasons


def _load(run: BenchRun) -> tuple[float, int | None]:
    return run.rate, run.concurrency


def _saturation_ratio(a: KneeResult, b: KneeResult) -> tuple[float, float] | None:
    if a.saturation_rate is None or b.saturation_rate is None:
        return None
    if a.saturation_ci90 is None or b.saturation_ci90 is None:
        return None
    return ratio_interval(a.saturation_rate, a.saturation_ci90, b.saturation_rate, b.saturation_ci90)


def _capacity_difference(name: str, a: SloCapacity, b: SloCapacity) -> Difference:
    return Difference(
        name,
        "req/s",
        a.rate,
        b.rate,
        ratio_interval(a.rate, a.ci90, b.rate, b.ci90),
        is_better_when_less=False,
    )


def _capacity_sentence(one: Difference) -> str:
    assert one.ratio_ci90 is not None, "capacities have intervals"
    low, high = one.ratio_ci90
    figures = (
        f"{one.a:.4g} and {one.b:.4g} requests/s; ratio {one.ratio:.3f}, 90 % interval "
        f"{low:.3f} to {high:.3f}"
    )
    if one.verdict == "no difference shown":
        return f"No difference shows in the {one.figure}: {figures}, which holds 1."
    return f"The {one.figure} is {_percent(one.ratio)} in B: {figures}, which does not hold 1."


def _check_capacities(result: KneeResult, side: str) -> None:
    """Raises ConfigError for what no search writes, and no ratio is of."""
    for tier in result.tiers:
        if tier.slo_capacity is None:
            continue
        rate, (low, high) = tier.slo_capacity.rate, tier.slo_capacity.ci90
        if not (0 < rate < math.inf and 0 <= low <= high):
            raise ConfigError(
                f"the file of {side} is not to be read: the capacity of {tier.name!r} is {rate:g} "
                f"({low:g} to {high:g}) requests/s"
            )


def _sentence(one: Difference) -> str:
    assert one.ratio_ci90 is not None, "only what has an interval is called"
    low, high = one.ratio_ci90
    is_better = (one.verdict == "less") == one.is_better_when_less
    if math.isinf(one.a) or math.isinf(one.b):  # failures reach that far on one side
        return (
            f"The {one.figure} is {_told(one.a, one.unit)} in A and {_told(one.b, one.unit)} in "
            "B, by its failures."
        )
    return (
        f"The {one.figure} is {_percent(one.ratio)} in B, which is "
        f"{'better' if is_better else 'worse'}: {_told(one.a, one.unit)} and "
        f"{_told(one.b, one.unit)}; ratio 90 % interval {low:.3f} to {high:.3f}."
    )


def _called(differences: Sequence[Difference]) -> list[str]:
    """What differs; and how many would by chance, as there are many figures."""
    called = [_sentence(one) for one in differences if one.verdict in ("more", "less")]
    num_tested = sum(one.ratio_ci90 is not None for one in differences)
    if called and num_tested > 1:
        by_chance = max(1, round(0.1 * num_tested))
        called.append(
            f"{num_tested} figures were compared, of which about {by_chance} would differ by chance."
        )
    return called


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} % higher" if ratio >= 1 else f"{100 * (1 - ratio):.1f} % lower"


def _told(value: float, unit: str) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g} {unit}".rstrip()


def _unloaded_differences(a: KneeResult, b: KneeResult) -> list[Difference]:
    """Of single requests, which are independent."""
    both = [
        requests_of([one for probe in result.probes if probe.kind == "unloaded" for one in probe.requests])
        for result in (a, b)
    ]
    if not all(len(one) for one in both):
        return []
    blocks = [np.arange(len(one), dtype=float) for one in both]
    return _latency_differences(both[0], blocks[0], both[1], blocks[1], (50.0,), ", one at a time", least=3)


def _probe_differences(a: KneeResult, b: KneeResult) -> list[Difference]:
    """Of open-loop probes whose rates are alike, in pairs by rate; each is used once."""
    left = rate_points(b.probes)
    differences: list[Difference] = []
    for point in rate_points(a.probes):
        alike = [
            other for other in left if other.cv == point.cv and abs(other.rate / point.rate - 1) <= ALIKE / 2
        ]
        if not alike or point.ended_early:
            continue
        other = min(alike, key=lambda one: abs(one.rate - point.rate))
        left.remove(other)
        differences += _point_differences(point, other)
    return differences


def _point_differences(a: RatePoint, b: RatePoint) -> list[Difference]:
    where = f" at {a.rate:.3g}/s" if a.rate == b.rate else f" at {a.rate:.3g} and {b.rate:.3g}/s"
    return _latency_differences(a.requests, a.block, b.requests, b.block, PERCENTS, where)


def _latency_differences(
    a: Requests,
    a_block: Floats,
    b: Requests,
    b_block: Floats,
    percents: Sequence[float],
    where: str,
    least: int = MIN_REQUESTS,
) -> list[Difference]:
    differences = []
    for name, words in NAMES.items():
        latencies = [getattr(one, f"{name}_s") for one in (a, b)]
        known = [~np.isnan(one) for one in latencies]
        if min(int(one.sum()) for one in known) < least:
            continue
        draws = [
            _drawn_percentiles(one[is_known], block[is_known], percents, seed)
            for seed, (one, is_known, block) in enumerate(
                zip(latencies, known, (a_block, b_block), strict=True)
            )
        ]
        effect = _design_effect([*zip(latencies, known, (a_block, b_block), strict=True)])
        for place, percent in enumerate(percents):
            values = [percentile_with_failures(one, percent) for one in latencies]
            differences.append(
                Difference(
                    figure=f"p{percent:g} {words}{where}",
                    unit="s",
                    a=values[0],
                    b=values[1],
                    ratio_ci90=_ratio_of_draws(draws[0][:, place], draws[1][:, place]),
                    design_effect=effect,
                )
            )
    return differences


def _drawn_percentiles(values: Floats, block: Floats, percents: Sequence[float], seed: int) -> Floats:
    """Of samples of half as many blocks as there are, see `block_weights`. [num_draws, num_percents]"""
    rng = np.random.default_rng(seed)
    pieces = [values[block == number] for number in np.unique(block)]
    drawn = np.empty((NUM_DRAWS, len(percents)))
    for row in drawn:
        numbers = rng.integers(len(pieces), size=max(1, len(pieces) // 2))
        sample = np.concatenate([pieces[number] for number in numbers])
        row[:] = np.percentile(sample, percents, method="higher")
    return drawn


def _ratio_of_draws(a: Floats, b: Floats) -> tuple[float, float] | None:
    """None where most draws are infinite on both sides: failures reach that far in both."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = b / a  # inf / inf is not a number
    known = ratios[~np.isnan(ratios)]
    if len(known) < 0.9 * NUM_DRAWS:
        return None
    low, high = np.percentile(known, [5, 95], method="nearest")
    return float(low), float(high)


def _design_effect(sides: Sequence[tuple[Floats, Any, Floats]]) -> float:
    """Variance of the means of blocks over that of as many independent requests, the larger of both sides."""
    effects = [1.0]
    for values, known, block in sides:
        finite = known & np.isfinite(values)
        spread = float(np.var(values[finite])) if finite.any() else 0.0
        if spread == 0:
            continue
        pieces = [values[finite & (block == number)] for number in np.unique(block[finite])]
        mean = float(np.mean(values[finite]))
        effects.append(
            float(np.mean([len(piece) * (np.mean(piece) - mean) ** 2 for piece in pieces])) / spread
        )
    return max(effects)


def _run_differences(a: BenchRun, b: BenchRun, where: str) -> list[Difference]:
    differences: list[Difference] = []
    if a.probe is not None and b.probe is not None:
        requests = [requests_of(run.probe.measured) for run in (a, b) if run.probe is not None]
        blocks = [
            block_numbers(one.due_s, run.probe.warm_cut_s, run.probe.end_s)
            for one, run in zip(requests, (a, b), strict=True)
            if run.probe is not None
        ]
        differences += _latency_differences(requests[0], blocks[0], requests[1], blocks[1], PERCENTS, where)
    else:
        for name, words in NAMES.items():
            for percent in PERCENTS:
                values = [run.statistic_s(name, percent) for run in (a, b)]
                if not any(map(math.isnan, values)):
                    remark = "of answered requests, from when they were sent"
                    differences.append(
                        Difference(
                            f"p{percent:g} {words}{where}", "s", values[0], values[1], None, remark=remark
                        )
                    )
    for key, words, unit in (
        ("request_throughput", "request throughput", "req/s"),
        ("output_throughput", "output throughput", "tokens/s"),
        ("request_goodput", "goodput", "req/s"),
    ):
        told = [float(value) for run in (a, b) if isinstance(value := run.values.get(key), int | float)]
        if len(told) == 2:
            ratio_ci90 = _throughput_ratio(a, b) if key == "request_throughput" else None
            differences.append(
                Difference(
                    f"{words}{where}",
                    unit,
                    told[0],
                    told[1],
                    ratio_ci90,
                    is_better_when_less=False,
                )
            )
    if a.num_failed or b.num_failed:
        differences.append(Difference(f"share of failures{where}", "", a.failed_share, b.failed_share, None))
    return differences


def _throughput_ratio(a: BenchRun, b: BenchRun) -> tuple[float, float] | None:
    """From how evenly answers came: blocks of time, resampled. None without the times of answers."""
    draws = []
    for seed, run in enumerate((a, b)):
        if run.probe is None:
            return None
        ends = np.array([one.end_s for one in run.probe.requests if not one.failed and one.end_s is not None])
        if len(ends) < MIN_REQUESTS:
            return None
        counts = np.bincount(block_numbers(ends, 0.0, run.probe.drained_s).astype(int), minlength=10)
        weights = block_weights(len(counts), NUM_DRAWS, np.random.default_rng(seed))
        draws.append(weights @ counts / run.probe.drained_s)
    return interval(draws[1] / draws[0])
