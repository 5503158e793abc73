"""The alert rules of `headrace plan`: they parse, they fire on what they are for, and on nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from loadtest.plan.alert_rules import AlertRule, Timing, alert_rules, duration_text, rules_document, timing_of
from loadtest.plan.autoscaler import adapter_document, in_flight_expression
from loadtest.plan.plan_files import yaml_text
from loadtest.plan.thresholds import Thresholds
from tests.prometheus_server import needs_promtool, promtool

LIMITS = Thresholds(
    rate=11.2,
    running=28.0,
    waiting=1.0,
    in_flight=28.5,
    is_in_flight_of_client=False,
    kv_usage=0.9,
    kv_usage_at_capacity=0.66,
    error_share=0.05,
    attainment=0.95,
    ttft_s=0.5,
    tpot_s=0.05,
    e2el_s=20.0,
)
ENGINE = 'model_name="small",engine="small-0"'


def rules_of(limits: Thresholds = LIMITS, model: str | None = None) -> dict[str, AlertRule]:
    rules, _ = alert_rules(limits, model)
    return {rule.name: rule for rule in rules}


@pytest.mark.parametrize("model", [None, "small", 'odd "name" \\ with {braces}'])
def test_every_expression_is_promql(model: str | None) -> None:
    rules, left_out = alert_rules(LIMITS, model)
    assert not left_out
    assert len(rules) == 11
    for rule in rules:
        promql_parser.parse(rule.expression)
    promql_parser.parse(in_flight_expression(model))
    promql_parser.parse(adapter_document(model)["rules"]["external"][0]["metricsQuery"])


def test_a_named_model_is_all_that_its_rules_look_at() -> None:
    for rule in rules_of(model="small").values():
        engine_series = rule.expression.count("vllm:") + rule.expression.count("headrace_engine_")
        assert rule.expression.count('model_name="small"') == engine_series, rule.expression


def test_thresholds_are_those_of_the_measurement() -> None:
    rules = rules_of(replace(LIMITS, running=12.34, waiting=3.0, in_flight=15.5))
    assert rules["HeadraceRunningNearCapacity"].expression.endswith("> 12.34")
    assert rules["HeadraceQueueGrows"].expression.endswith("> 3")
    assert rules["HeadraceNearCapacity"].expression.endswith("> 15.5")
    assert rules["HeadraceSlowFirstToken"].expression.endswith("> 0.5")
    assert "histogram_quantile(0.95," in rules["HeadraceSlowFirstToken"].expression


def test_what_was_not_measured_makes_no_rule_and_is_told() -> None:
    hidden = replace(LIMITS, running=None, waiting=None, in_flight=None, ttft_s=None, e2el_s=8000.0)
    rules, left_out = alert_rules(hidden)
    assert {line.partition(":")[0] for line in left_out} == {
        "HeadraceRunningNearCapacity", "HeadraceQueueGrows", "HeadraceNearCapacity", "HeadraceSlowAnswers",
    }  # fmt: skip
    assert "HeadraceSlowFirstToken" not in {rule.name for rule in rules}


def test_a_rule_says_whether_its_histogram_can_tell_the_limit_exactly() -> None:
    assert "so this is exact" in rules_of()["HeadraceSlowFirstToken"].description
    between = rules_of(replace(LIMITS, ttft_s=0.6))["HeadraceSlowFirstToken"]
    assert "so this is interpolated" in between.description


def test_the_file_is_yaml_and_reads_back_as_it_was_made() -> None:
    document = rules_document(alert_rules(LIMITS)[0])
    text = yaml_text([document], "Made by a test.")
    assert text.startswith("# Made by a test.\n")
    assert yaml.safe_load(text) == document


@pytest.mark.parametrize(("seconds", "text"), [(300, "5m"), (60, "1m"), (90, "90s"), (2, "2s")])
def test_times_are_written_as_prometheus_reads_them(seconds: int, text: str) -> None:
    assert duration_text(seconds) == text


def test_where_nobody_is_served_the_alarm_is_no_later_than_others() -> None:
    assert timing_of(300.0, 120.0) == Timing()
    assert timing_of(30.0, 10.0) == Timing(30, 10, 10, 30)


def of_engine(metric: str, values: str, engine: str = ENGINE) -> dict[str, str]:
    return {"series": f"{metric}{{{engine}}}", "values": values}


def healthy() -> list[dict[str, str]]:
    """An hour's third: one engine, lightly loaded, as two gateways report it."""
    series = []
    for gateway in ("a", "b"):
        engine = f'{ENGINE},instance="{gateway}"'
        series += [
            of_engine("headrace_engine_up", "1x80", engine),
            of_engine("vllm:num_requests_running", "20x80", engine),
            of_engine("vllm:num_requests_waiting", "0x80", engine),
            of_engine("vllm:kv_cache_usage_perc", "0.5x80", engine),
            of_engine("headrace_engine_steps_total", "0+900x80", engine),
            {"series": f'headrace_requests_in_flight{{instance="{gateway}"}}', "values": "10x80"},
            *outcomes(gateway, ok=150, failed=1, refused=50),
            *histogram(
                "vllm:time_to_first_token_seconds", engine, {"0.25": 146, "0.5": 149, "1.0": 150, "+Inf": 150}
            ),
            *histogram(
                "headrace_variant_time_per_output_token_seconds",
                f'route="chat",variant="small",instance="{gateway}"',
                {"0.025": 146, "0.05": 149, "1.0": 150, "+Inf": 150},
            ),
            *histogram(
                "vllm:e2e_request_latency_seconds",
                engine,
                {"10.0": 146, "20.0": 149, "40.0": 150, "+Inf": 150},
            ),
        ]
    return series


def outcomes(gateway: str, **per_step: int) -> list[dict[str, str]]:
    labels = f'route="chat",variant="small",instance="{gateway}"'
    return [
        {
            "series": f'headrace_variant_requests_total{{{labels},outcome="{outcome}"}}',
            "values": f"0+{count}x80",
        }
        for outcome, count in per_step.items()
    ]


def histogram(name: str, labels: str, per_step: dict[str, int]) -> list[dict[str, str]]:
    return [
        {"series": f'{name}_bucket{{{labels},le="{edge}"}}', "values": f"0+{count}x80"}
        for edge, count in per_step.items()
    ]


def changed(**values: str) -> list[dict[str, str]]:
    """The healthy series, with others in place of some: by metric, or by part of a name."""
    series = [dict(one) for one in healthy()]
    for part, replacement in values.items():
        hit = [
            one
            for one in series
            if part in one["series"].replace(":", "_").replace('"', "").replace("=", "_")
        ]
        assert hit, part
        for one in hit:
            one["values"] = replacement
    return series


def slower(histogram: str) -> list[dict[str, str]]:
    """One answer in fifteen is beyond the limit: 93 % keep it, not 95."""
    series = [dict(one) for one in healthy()]
    for one in series:
        if one["series"].startswith(histogram) and not one["series"].endswith(
            ('le="+Inf"}', 'le="1.0"}', 'le="40.0"}')
        ):
            one["values"] = "0+140x80"
    return series


FAULTS: dict[str, list[dict[str, str]]] = {
    "HeadraceRunningNearCapacity": changed(vllm_num_requests_running="28.4x80"),
    "HeadraceQueueGrows": changed(vllm_num_requests_waiting="2x80"),
    "HeadraceNearCapacity": changed(vllm_num_requests_running="27.9x80", vllm_num_requests_waiting="0.9x80"),
    "HeadraceKvCacheNearlyFull": changed(vllm_kv_cache_usage_perc="0.93x80"),
    "HeadraceSlowFirstToken": slower("vllm:time_to_first_token_seconds"),
    "HeadraceSlowTokens": slower("headrace_variant_time_per_output_token_seconds"),
    "HeadraceSlowAnswers": slower("vllm:e2e_request_latency_seconds"),
    "HeadraceErrors": changed(outcome_failed="0+12x80"),
    "HeadraceUpButNotServing": changed(headrace_engine_steps_total="900x80"),
    "HeadraceNoEngine": changed(headrace_engine_up="0x80"),
    "HeadraceNoGateway": [one for one in healthy() if "requests_in_flight" not in one["series"]],
}


def fired(folder: Path, series: list[dict[str, str]], minutes: int) -> set[str]:
    """The names of the rules that fire then, as Prometheus itself evaluates them.

    Its command compares with what is expected and tells what differs: nothing is expected, so it tells all.
    """
    rules = alert_rules(LIMITS)[0]
    (folder / "rules.yml").write_text(yaml_text([rules_document(rules)], "of a test"))
    expected_none = [{"eval_time": f"{minutes}m", "alertname": rule.name, "exp_alerts": []} for rule in rules]
    tests: dict[str, Any] = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "alert_rule_test": expected_none}],
    }
    (folder / "tests.yml").write_text(json.dumps(tests))
    ended = promtool("test", "rules", folder / "tests.yml")
    told = ended.stdout + ended.stderr
    firing = set(re.findall(r"alertname: ?(\w+)", told))
    assert bool(firing) == bool(ended.returncode), told
    return firing


@needs_promtool
def test_prometheus_itself_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml_text([rules_document(alert_rules(LIMITS)[0])], "of a test"))
    ended = promtool("check", "rules", tmp_path / "rules.yml")
    assert ended.returncode == 0, ended.stderr
    assert "11 rules found" in ended.stdout


@needs_promtool
def test_no_rule_fires_on_a_healthy_stack(tmp_path: Path) -> None:
    assert fired(tmp_path, healthy(), 15) == set()


@needs_promtool
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_each_fault_fires_its_rule_within_its_time_and_a_minute(tmp_path: Path, name: str) -> None:
    rule = rules_of()[name]
    assert rule.pending_s in (60, 120)
    assert fired(tmp_path, FAULTS[name], rule.pending_s // 60 + 1) == {name}


@needs_promtool
def test_an_engine_that_queues_and_runs_nothing_is_not_serving(tmp_path: Path) -> None:
    series = changed(vllm_num_requests_running="0x80", vllm_num_requests_waiting="0.5x80")
    assert fired(tmp_path, series, 3) == {"HeadraceUpButNotServing"}


@needs_promtool
def test_a_rule_about_no_engine_fires_when_the_gateways_know_none_at_all(tmp_path: Path) -> None:
    series = [one for one in healthy() if ENGINE not in one["series"]]
    assert fired(tmp_path, series, 3) == {"HeadraceNoEngine"}


@needs_promtool
def test_a_model_is_missed_though_others_have_engines(tmp_path: Path) -> None:
    other = healthy()
    for one in other:
        one["series"] = one["series"].replace(ENGINE, 'model_name="big",engine="big-0"')
    gone = of_engine("headrace_engine_up", "1x3 stale")  # after 45 s
    assert fired(tmp_path, [*other, gone], 3) == {"HeadraceNoEngine"}
    assert fired(tmp_path, [*other, of_engine("headrace_engine_up", "0x80")], 3) == {"HeadraceNoEngine"}
    assert fired(tmp_path, [*other, of_engine("headrace_engine_up", "1x80")], 3) == set()


@needs_promtool
def test_refused_requests_do_not_hide_those_that_fail(tmp_path: Path) -> None:
    series = [one for one in healthy() if "headrace_variant_requests_total" not in one["series"]]
    series += outcomes("a", ok=90, failed=10, refused=1000)
    assert fired(tmp_path, series, 5) == {"HeadraceErrors"}
