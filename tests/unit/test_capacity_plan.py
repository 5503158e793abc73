"""`headrace plan`: replicas from a measured knee. Figures are worked out by hand beside each case."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from compose.cli import app
from loadtest.knee.result import KneeResult, Status, write_result
from loadtest.plan.measurement import Measurement, RateFigure, choose_tier, measure
from loadtest.plan.plan import CapacityPlan, Target, make_plan
from loadtest.plan.plan_table import plan_text
from loadtest.plan.sizing import Headroom, Pooling, replicas_for, survives_loss
from loadtest.plan.thresholds import thresholds_of
from loadtest.plan.time_span import parse_time_span
from shared.errors import ConfigError
from tests.knee_results import SLO, knee_result, simulated_probe, tier_result


def measured(rate: float = 20.0, ci90: tuple[float, float] = (17.5, 22.0), **fields: Any) -> Measurement:
    """Without probes: what they say is given."""
    result = knee_result([tier_result(rate, ci90)])
    figures: dict[str, Any] = {
        "prompt_tokens": 600.0,
        "output_tokens": 150.0,
        "prefix_hit_share": 0.0,
        "kv_usage": RateFigure([10.0], [0.4]),
    }
    return replace(measure(result, result.tiers[0]), **(figures | fields))


def planned(one: Measurement | None = None, **target: Any) -> CapacityPlan:
    return make_plan(Target(**({"rate": 140.0} | target)), one or measured())


@pytest.mark.parametrize(
    ("load", "capacity", "headroom", "of_two", "replicas"),
    [
        (140, 17.5, 0.2, 1.0, 10),  # 140 / 14 is 10, although floating point says a little more
        (140.1, 17.5, 0.2, 1.0, 11),
        (1, 17.5, 0.2, 1.0, 1),
        (14, 17.5, 0.2, 1.0, 1),
        (14.1, 17.5, 0.2, 1.0, 2),
        (100, 10, 0.0, 1.0, 10),
        # s = 1/0.8 - 1 = 0.25: three do 3 / 1.5 = 2 of one, four 4 / 1.75 = 2.29, and never 4.
        (20, 10, 0.0, 0.8, 3),
        (21, 10, 0.0, 0.8, 4),
        (39, 10, 0.0, 0.8, 117),  # R / (1 + (R - 1) / 4) >= 3.9: R >= 3.9 · 0.75 / 0.025
        (40, 10, 0.0, 0.8, None),
        # A shared queue: two do 2.2 of one, four 4.4.
        (22, 10, 0.0, 1.1, 2),
        (44, 10, 0.0, 1.1, 4),
        (10.5, 10, 0.0, 1.1, 2),  # of one alone there is nothing to share
        (1, 0, 0.0, 1.0, None),
    ],
)
def test_replicas_are_the_fewest_that_carry_the_load(
    load: float, capacity: float, headroom: float, of_two: float, replicas: int | None
) -> None:
    assert replicas_for(load, capacity, headroom, Pooling(of_two)) == replicas


@pytest.mark.parametrize(
    ("load", "capacity", "num_replicas", "of_two", "holds"),
    [
        (140, 17.5, 9, 1.0, True),  # eight do 140
        (140, 17.4, 9, 1.0, False),
        (10, 17.5, 1, 1.0, False),  # nothing is left of one
        (20, 10, 4, 0.8, True),  # three do 2 of one
        (20.1, 10, 4, 0.8, False),
    ],
)
def test_the_loss_of_one_replica_is_checked_without_headroom(
    load: float, capacity: float, num_replicas: int, of_two: float, holds: bool
) -> None:
    assert survives_loss(load, capacity, num_replicas, Pooling(of_two)) is holds


def test_planning_starts_from_the_lower_end_of_the_interval() -> None:
    plan = planned(measured(20.0, (17.5, 22.0)))
    assert (plan.num_needed, plan.num_spare, plan.num_replicas) == (
        10,
        1,
        11,
    )  # not 140 / 16 = 9 of the estimate
    assert plan.binding == "rate"
    assert plan.survives_loss
    assert plan.rate_per_replica == pytest.approx(140 / 11)
    assert plan.utilisation == pytest.approx(140 / (11 * 17.5))


def test_the_loss_of_one_and_the_utilisation_are_those_of_what_binds() -> None:
    full_at_ten = measured(kv_usage=RateFigure([10.0], [0.9]))
    plan = planned(full_at_ten, headroom=0.0, spare=0)
    assert (plan.num_replicas, plan.utilisation, plan.survives_loss) == (14, pytest.approx(1.0), False)
    assert planned(full_at_ten, headroom=0.0, spare=1).survives_loss


def test_a_single_replica_gets_no_spare_unless_asked_and_fails_the_check() -> None:
    plan = planned(rate=10.0)
    assert (plan.num_replicas, plan.survives_loss) == (1, False)
    plan = planned(rate=10.0, spare=1)
    assert (plan.num_replicas, plan.survives_loss) == (2, True)


def test_headroom_grows_to_what_growth_needs_while_a_replica_starts() -> None:
    headroom = Headroom(0.2, growth_per_s=1.4, replica_start_s=30, peak_rate=140)
    assert headroom.needed == pytest.approx(0.3)
    assert headroom.used == headroom.needed
    plan = planned(growth_per_s=1.4, replica_start_s=30.0)
    assert plan.num_needed == 12  # 140 / (17.5 · 0.7) = 11.4
    assert planned(growth_per_s=0.1, replica_start_s=30.0).headroom.used == 0.2


def test_growth_that_outruns_the_start_of_replicas_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the whole peak"):
        planned(growth_per_s=5.0, replica_start_s=30.0)


@pytest.mark.parametrize(("headroom", "flag"), [(1.0, "--headroom"), (-0.1, "--headroom")])
def test_headroom_is_a_share(headroom: float, flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(headroom=headroom)
    assert error.value.param == flag


@pytest.mark.parametrize(
    ("target", "binding", "replicas"),
    [
        ({}, "rate", 10),
        ({"prompt_tokens": 1200.0}, "prompt tokens", 20),  # twice the measured
        ({"output_tokens": 300.0}, "output tokens", 20),
        ({"prompt_tokens": 300.0, "output_tokens": 75.0}, "rate", 10),  # less work is not taken for granted
    ],
)
def test_the_sizing_that_asks_for_most_binds(target: dict[str, float], binding: str, replicas: int) -> None:
    plan = planned(measured(kv_usage=RateFigure([10.0], [0.1])), **target)
    assert (plan.binding, plan.num_needed) == (binding, replicas)


def test_memory_binds_where_caches_fill_before_the_promise_breaks() -> None:
    # 0.09 of the cache for each request/s: 10 fill 0.9; the load with its headroom is 175.
    plan = planned(measured(kv_usage=RateFigure([10.0], [0.9])))
    assert (plan.binding, plan.num_needed) == ("KV memory", 18)


def test_tokens_held_stand_in_for_a_server_that_hides_its_memory() -> None:
    hidden = measured(kv_usage=None, held_tokens=RateFigure([10.0], [9000.0]))
    unknown = next(one for one in planned(hidden).sizings if one.resource == "KV memory")
    assert (unknown.num_replicas, unknown.basis) == (None, "not known")
    assert "--kv-tokens" in unknown.remark
    plan = planned(hidden, kv_tokens=10_000)  # 0.9 of them are 9000, at 10 requests/s
    assert (plan.binding, plan.num_needed) == ("KV memory", 18)


def test_two_measured_replicas_change_how_many_are_needed() -> None:
    two = measured(38.0, (37.9, 38.1))
    plan = make_plan(Target(140.0), measured(20.0, (19.9, 20.1)), two_replicas=two)
    assert plan.pooling.of_two == pytest.approx(0.95)
    assert plan.num_needed == 16  # s = 1/19, 15.92 is usable: R / (1 + (R - 1) / 19) >= 8.794 from 15.5 on


def test_pooling_that_may_as_well_be_whole_is_not_stretched_over_many_replicas() -> None:
    two = measured(28.0, (26.5, 29.5))
    plan = make_plan(Target(140.0), measured(15.0, (14.2, 15.7)), two_replicas=two)
    assert plan.pooling_estimate is not None
    assert plan.pooling_estimate.value == pytest.approx(28 / 30)
    assert plan.pooling_estimate.low < 28 / 30 < 1 < plan.pooling_estimate.high
    assert (plan.pooling.of_two, plan.num_needed) == (1.0, 13)  # 140 / 11.36 = 12.3
    assert "which holds 100 %: taken as 100 %" in plan_text(plan)


def test_pooling_beyond_what_a_shared_queue_gains_is_told_and_not_used() -> None:
    two = measured(60.0, (59.0, 61.0))
    plan = make_plan(Target(140.0), measured(20.0, (19.9, 20.1)), two_replicas=two)
    assert plan.pooling.of_two == 1.1
    assert "150% of twice" in plan.warnings[0]


@pytest.mark.parametrize("rate", [float("inf"), 1e300, 1e9, 0.0, float("nan")])
def test_a_load_without_sense_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="at most 1,000,000") as error:
        planned(rate=rate)
    assert error.value.param == "--target-rps"


def test_large_loads_are_planned_or_refused_at_once() -> None:
    one = measured(kv_usage=RateFigure([10.0], [0.9]))
    assert planned(one, rate=5e5).num_needed == 62_500
    with pytest.raises(ConfigError, match="100,000 replicas"):
        planned(one, rate=1e6)


def test_memory_is_full_where_the_figure_first_passes_the_limit() -> None:
    figure = RateFigure([10.0, 20.0, 30.0], [0.4, 0.8, 0.6])
    assert figure.rate_reaching(0.2) == pytest.approx(5.0)  # in proportion
    assert figure.rate_reaching(0.6) == pytest.approx(15.0)
    assert figure.rate_reaching(0.9) == pytest.approx(45.0)
    assert RateFigure([10.0], [0.0]).rate_reaching(0.9) == math.inf


@pytest.mark.parametrize("kv_usage", [RateFigure([10.0], [0.9]), RateFigure([10.0], [0.4])])
def test_each_sizing_follows_from_its_own_columns(kv_usage: RateFigure) -> None:
    for one in planned(measured(kv_usage=kv_usage)).sizings:
        assert one.demand is not None
        assert one.per_replica is not None
        assert one.num_replicas == math.ceil(one.demand / (one.per_replica * 0.8) - 1e-9)


@pytest.mark.parametrize(
    ("kv_slope", "target"), [(0.4, {"output_tokens": 1000.0}), (0.9, {}), (0.4, {"prompt_tokens": 3000.0})]
)
def test_sensitivities_are_sized_by_all_that_the_plan_is(kv_slope: float, target: dict[str, float]) -> None:
    plan = planned(measured(kv_usage=RateFigure([10.0], [kv_slope])), **target)
    rows = {row.name: row for row in plan.sensitivities}
    assert plan.binding != "rate"
    assert rows["arrivals with CV 1"].num_replicas == plan.num_replicas
    assert f"{plan.binding} binds" in rows["arrivals with CV 1"].remark
    assert (rows["output +25%"].num_replicas or 0) >= plan.num_replicas


def test_replicas_that_hinder_each_other_too_much_are_refused() -> None:
    with pytest.raises(ConfigError, match="no number of replicas carries this load"):
        make_plan(Target(140.0), measured(), two_replicas=measured(30.0, (28.0, 32.0)))


def test_sensitivity_says_what_is_measured_and_what_is_assumed() -> None:
    result = knee_result([tier_result(20.0, (17.5, 22.0)), tier_result(16.0, (14.0, 18.0), arrival_cv=2.0)])
    one, other = (replace(measure(result, tier), prefix_hit_share=0.3) for tier in result.tiers)
    rows = {row.name: row for row in make_plan(Target(140.0), one, other_cvs=[other]).sensitivities}
    assert [rows[f"arrivals with CV {cv}"].basis for cv in (1, 2)] == ["measured", "measured"]
    assert rows["arrivals with CV 2"].num_replicas == 14  # 140 / 11.2 = 12.5, and a spare
    assert rows["prefix hits 0 %"].basis == "computed"
    assert rows["prefix hits 0 %"].capacity == pytest.approx(17.5 * 0.7)
    assert "30%" in rows["prefix hits 0 %"].remark
    assert rows["output +25%"].num_replicas == 14  # 140 / (14 · 0.8) = 12.5, and a spare
    assert "assumes" in rows["output +25%"].remark


def test_what_was_not_measured_is_not_guessed() -> None:
    rows = {row.name: row for row in planned(measured(prefix_hit_share=None)).sensitivities}
    assert (rows["arrivals with CV 2"].num_replicas, rows["arrivals with CV 2"].basis) == (None, "not known")
    assert rows["prefix hits 0 %"].num_replicas is None


def test_gateways_are_planned_from_their_own_knee() -> None:
    probes = [simulated_probe(rate, seed=int(rate)) for rate in (5.0, 10.0)]
    result = knee_result([tier_result(100.0, (90.0, 110.0))], probes)
    plan = make_plan(Target(140.0), measured(), gateway=measure(result, result.tiers[0]))
    assert plan.gateway is not None
    assert plan.gateway.num_gateways == 3  # 140 / 72 = 1.9, and a spare
    assert plan.gateway.ttft_p50_s is not None
    assert 0 < plan.gateway.ttft_p50_s <= (plan.gateway.ttft_p99_s or 0)


def test_cost_is_that_of_the_planned_point() -> None:
    cost = planned(price_per_hour=2.0).cost
    assert cost is not None
    assert cost.price_per_hour == 22.0
    millions_per_hour = 140 * 150 * 3600 / 1e6
    assert cost.replica_hours_per_million_output_tokens == pytest.approx(11 / millions_per_hour)
    assert cost.price_per_million_output_tokens == pytest.approx(22 / millions_per_hour)


def test_thresholds_are_what_the_probes_showed_at_four_fifths_of_the_capacity() -> None:
    one = measured(
        running=RateFigure([10.0, 20.0], [12.0, 40.0]), waiting=RateFigure([10.0, 20.0], [0.0, 8.0])
    )
    limits = thresholds_of(one)
    assert limits.rate == pytest.approx(14.0)
    assert limits.running == pytest.approx(23.2)
    assert limits.waiting == pytest.approx(3.2)
    assert limits.in_flight == pytest.approx(26.4)
    assert (limits.ttft_s, limits.tpot_s, limits.attainment) == (0.5, 0.05, 0.95)


def test_below_the_lowest_probe_a_figure_is_in_proportion_to_the_rate() -> None:
    assert RateFigure([10.0, 20.0], [12.0, 40.0]).at(5.0) == pytest.approx(6.0)
    assert RateFigure([10.0, 20.0], [12.0, 40.0]).at(30.0) == pytest.approx(60.0)


def test_figures_of_probes_agree_with_littles_law() -> None:
    probes = [simulated_probe(rate, seed=int(rate), duration_s=60.0) for rate in (6.0, 12.0)]
    result = knee_result(probes=probes)
    one = measure(result, result.tiers[0])
    assert one.in_flight is not None
    assert one.running is not None
    assert one.in_flight.at(12.0) == pytest.approx(one.running.at(12.0), rel=0.15)  # nobody waits
    latencies = [request.e2el_due for request in probes[1].measured]
    assert one.in_flight.at(12.0) == pytest.approx(12.0 * sum(latencies) / len(latencies), rel=0.15)
    assert one.prompt_tokens == pytest.approx(600, rel=0.2)


@pytest.mark.parametrize("status", ["invalid", "client_bound", "infeasible"])
def test_nothing_is_planned_from_a_measurement_that_means_nothing(
    tmp_path: Path, status: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, knee_result([tier_result(status=status)], reasons=["the cache drifted"]))
    with pytest.raises(ConfigError, match=r"nothing to plan from.*the cache drifted"):
        run("plan", file, "--target-rps", "140")
    assert not (tmp_path / "out").exists()
    run("plan", file, "--target-rps", "140", "--force", "--output-dir", str(tmp_path / "out"))
    assert "WARNING" in capsys.readouterr().out


def test_a_tier_is_planned_though_another_promise_cannot_be_kept(tmp_path: Path) -> None:
    strict = msgspec.structs.replace(SLO, name="strict")
    hopeless = tier_result(slo=strict, status="infeasible", slo_capacity=None, reasons=["900 ms alone"])
    tiers = [hopeless, tier_result()]
    file = written(tmp_path, knee_result(tiers, status="infeasible", reasons=["900 ms alone"]))
    run("plan", file, "--target-rps", "14", "--tier", SLO.name, "--output-dir", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="cannot be kept at any load: 900 ms alone"):
        run("plan", file, "--target-rps", "14", "--tier", "strict")


def test_an_unsettled_search_needs_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, knee_result([tier_result(status="unresolved", slo_capacity=None)]))
    with pytest.raises(ConfigError, match="without a capacity"):
        run("plan", file, "--target-rps", "140")
    wide = written(tmp_path, knee_result([tier_result(15.0, (9.0, 20.0), status="unresolved")]))
    run("plan", wide, "--target-rps", "14", "--output-dir", str(tmp_path / "out"))
    assert "did not settle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cv", "2"], "not measured at CV 2"),
        (["--tier", "batch"], "no tier 'batch'"),
        (["--replica-start", "soon"], "'soon' is not a time"),
    ],
)
def test_what_cannot_be_planned_is_told(tmp_path: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run("plan", written(tmp_path, knee_result()), "--target-rps", "140", *arguments)


@pytest.mark.parametrize("flags", [[], ["--force"]])
@pytest.mark.parametrize(
    "fields", [{"slo_capacity": None}, {"slo_capacity": None, "status": "infeasible"}, {"ci90": (0.0, 16.0)}]
)
def test_force_is_offered_only_where_it_helps(
    tmp_path: Path, fields: dict[str, Any], flags: list[str]
) -> None:
    file = written(tmp_path, knee_result([tier_result(**fields)]))
    with pytest.raises(ConfigError, match="nothing to plan from") as error:
        run("plan", file, "--target-rps", "140", *flags)
    assert "--force" not in str(error.value)


def damaged_slo(result: KneeResult) -> None:
    result.slo[0] = msgspec.structs.replace(result.slo[0], ttft_ms=0.0)


def damaged_end(result: KneeResult) -> None:
    result.probes[0].end_s = -3.0


def damaged_token(result: KneeResult) -> None:
    result.probes[0].requests[3].first_token_s = -1.0


@pytest.mark.parametrize("command", ["plan", "report"])
@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (damaged_slo, r"slo\[0\].ttft_ms is 0"),
        (damaged_end, r"probes\[0\].end_s is -3"),
        (damaged_token, r"probes\[0\].requests.first_token_s\[3\] is -1"),
    ],
)
def test_figures_that_no_search_writes_are_named(
    tmp_path: Path, command: str, damage: Callable[[KneeResult], None], field: str
) -> None:
    result = knee_result(probes=[simulated_probe(5.0, duration_s=10.0)])
    damage(result)
    more = ["--target-rps", "140", "--output-dir", str(tmp_path / "out")] if command == "plan" else []
    with pytest.raises(ConfigError, match=field):
        run(command, written(tmp_path, result), *more)


def test_a_server_that_counts_no_tokens_is_planned_by_its_rate() -> None:
    probe = simulated_probe(5.0, duration_s=10.0, reports=False)
    for one in probe.requests:
        one.num_output_tokens = 0
    result = knee_result(probes=[probe])
    plan = make_plan(Target(140.0, output_tokens=100.0), measure(result, result.tiers[0]))
    assert plan.binding == "rate"
    assert {one.resource: one.basis for one in plan.sizings}["output tokens"] == "not known"


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["--alert-window", "1ms"], "--alert-window"),
        (["--alert-for", "999ms"], "--alert-for"),
        (["--deployment", "Engine_1"], "--deployment"),
        (["--deployment", "a\nb"], "--deployment"),
        (["--deployment", "-a"], "--deployment"),
        (["--deployment", "a" * 254], "--deployment"),
    ],
)
def test_what_clusters_and_prometheus_refuse_is_refused_before(
    tmp_path: Path, flags: list[str], flag: str
) -> None:
    with pytest.raises(ConfigError) as error:
        run("plan", written(tmp_path, knee_result()), "--target-rps", "140", *flags)
    assert error.value.param == flag


def test_a_plan_does_not_replace_its_measurement(tmp_path: Path) -> None:
    file = tmp_path / "capacity.json"
    write_result(knee_result(), file)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="would be written over"):
        run("plan", str(file), "--target-rps", "140", "--output-dir", str(tmp_path))
    assert file.read_bytes() == before


def test_what_a_file_says_does_not_break_out_of_a_comment(tmp_path: Path) -> None:
    file = written(tmp_path, knee_result(started_at="now\ngroups: []\r\x85\u2028spec: 1"))
    run("plan", file, "--target-rps", "140", "--output-dir", str(tmp_path / "out"))
    text = (tmp_path / "out" / "headrace-alerts.yml").read_text()
    assert text.splitlines()[0].startswith("# Made by")
    assert "spec: 1" in text.splitlines()[0]


def test_the_tier_of_an_arrival_law_is_chosen() -> None:
    tiers = [tier_result(), tier_result(12.0, (11.0, 13.0), arrival_cv=2.0)]
    assert choose_tier(knee_result(tiers), None, 2.0) is tiers[1]
    assert choose_tier(knee_result(tiers), SLO.name, None) is tiers[0]


def test_the_command_prints_a_table_and_writes_what_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = [simulated_probe(rate, seed=int(rate)) for rate in (8.0, 14.0)]
    file = written(tmp_path, knee_result([tier_result(15.0, (14.0, 16.0))], probes))
    folder = tmp_path / "out"
    run("plan", file, "--target-rps", "140", "--price-per-hour", "2", "--output-dir", str(folder))
    printed = capsys.readouterr().out
    assert printed.startswith("14 replicas for 140 requests/s (13 needed, 1 spare)\n")  # 140 / 11.2 = 12.5
    assert "loss of a replica: pass" in printed
    assert "rate (binding)" in printed
    capacity = json.loads((folder / "capacity.json").read_bytes())["headrace"]
    assert (capacity["replicas"], capacity["binding"]) == (14, "rate")
    keda = yaml.safe_load((folder / "keda-scaledobject.yml").read_text())
    assert keda["spec"]["maxReplicaCount"] == 14
    threshold = float(keda["spec"]["triggers"][0]["metadata"]["threshold"])
    assert threshold == pytest.approx(capacity["thresholds"]["in_flight"], rel=1e-3)
    hpa = yaml.safe_load((folder / "hpa.yml").read_text())
    assert (
        hpa["spec"]["metrics"][0]["external"]["target"]["averageValue"]
        == f"{round(1000 * capacity['thresholds']['in_flight'])}m"
    )
    adapter = yaml.safe_load((folder / "prometheus-adapter-values.yml").read_text())
    assert (
        adapter["rules"]["external"][0]["name"]["as"]
        == hpa["spec"]["metrics"][0]["external"]["metric"]["name"]
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0), (" 2 s ", 2.0)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert parse_time_span(text, "--alert-for") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "0s", "-3s", "1e9s", "1d", "0.0001ms"])
def test_a_time_without_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time above zero"):
        parse_time_span(text, "--alert-for")


def written(folder: Path, result: KneeResult) -> str:
    path = folder / "knee.json"
    write_result(result, path)
    return str(path)


def run(*arguments: str) -> None:
    app([*arguments], standalone_mode=False)
