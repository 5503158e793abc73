"""Figures of servers' /metrics pages, each in its own words."""

from __future__ import annotations

import pytest

from loadtest.server_metrics import (
    ServerSample,
    check_prefix_hits,
    metrics_url,
    not_reported,
    parse_metrics,
    prefix_hit_share,
)

TWO_ENGINES = b"""
# HELP vllm:num_requests_running Sequences in the running batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="e1",model_name="m \\"x\\" {1}"} 3.0
vllm:num_requests_running{engine="e2",model_name="m"} 4.0
vllm:num_requests_waiting{engine="e1"} 0.0
vllm:num_requests_waiting{engine="e2"} 12
vllm:num_requests_waiting_by_reason{reason="capacity"} 99
vllm:kv_cache_usage_perc{engine="e1"} 0.25
vllm:kv_cache_usage_perc{engine="e2"} 0.75
vllm:generation_tokens_total{engine="e1"} 1e3
vllm:generation_tokens_total{engine="e2"} 500
vllm:generation_tokens_created{engine="e2"} 1.7e9
vllm:prefix_cache_queries_total 1000
vllm:prefix_cache_hits_total 250
vllm:num_preemptions_total NaN
headrace_limit_refusals_total{limit="rpm",scope="tenant",tenant="a"} 2
headrace_limit_refusals_total{limit="tpm",scope="tenant",tenant="a"} 5
"""
LLAMA_CPP = b"""llamacpp:requests_processing 2
llamacpp:requests_deferred 1
llamacpp:tokens_predicted_total 77
llamacpp:prompt_tokens_total 33
"""


def test_engines_are_summed_and_the_fullest_cache_counts() -> None:
    sample = parse_metrics(TWO_ENGINES, 5.0)
    assert sample == ServerSample(
        at_s=5.0,
        running=7,
        waiting=12,
        kv_usage=0.75,
        generation_tokens=1500,
        prefix_queries=1000,
        prefix_hits=250,
        throttled=7,
    )
    assert sample.from_beginning(3.0).at_s == 2.0


def test_what_a_server_does_not_have_is_named_and_not_zero() -> None:
    sample = parse_metrics(LLAMA_CPP, 0.0)
    assert (sample.running, sample.waiting) == (2, 1)
    assert (sample.generation_tokens, sample.prompt_tokens) == (77, 33)
    assert not_reported([sample, sample]) == [
        "kv_usage",
        "prefix_queries",
        "prefix_hits",
        "preemptions",
        "throttled",
    ]
    assert not_reported([parse_metrics(b"<html>Not found</html>", 0.0)])[0] == "running"


def test_counter_that_is_announced_without_a_line_has_counted_nothing_yet() -> None:
    page = b"# HELP headrace_limit_refusals_total Refused.\n# TYPE headrace_limit_refusals_total counter\n"
    assert parse_metrics(page, 0.0).throttled == 0
    assert parse_metrics(page + b'headrace_limit_refusals_total{tenant="a"} 4.0\n', 0.0).throttled == 4
    gauge = b"# TYPE vllm:num_requests_running gauge\n"
    assert parse_metrics(gauge, 0.0).running is None


def counters(queries: float | None, hits: float | None) -> ServerSample:
    return ServerSample(at_s=0.0, prefix_queries=queries, prefix_hits=hits)


def test_hit_share_is_of_what_was_looked_up_in_between() -> None:
    assert prefix_hit_share(counters(1000, 900), counters(1400, 1000)) == 0.25
    assert prefix_hit_share(counters(1000, 900), counters(1000, 900)) is None  # nothing looked up
    assert prefix_hit_share(counters(1000, 900), counters(10, 1)) is None  # started anew in between
    assert prefix_hit_share(counters(None, None), counters(5, 5)) is None


@pytest.mark.parametrize(
    ("hits", "passed"), [(500, True), (519, True), (481, True), (521, False), (700, False)]
)
def test_hits_more_than_two_points_from_the_declared_share_are_another_load(hits: int, passed: bool) -> None:
    check = check_prefix_hits(0.5, counters(0, 0), counters(1000, hits))
    assert (check.check, check.passed, check.value) == ("prefix_hit_share", passed, hits / 1000)
    assert "declared are 50.0%" in check.reason


def test_hits_that_are_not_told_break_nothing_but_are_said() -> None:
    check = check_prefix_hits(0.5, counters(None, None), counters(None, None))
    assert check.passed
    assert check.value is None
    assert "does not report" in check.reason


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/metrics"])
def test_page_is_found_from_any_root_of_the_server(url: str) -> None:
    assert metrics_url(url) == "http://h:1/metrics"
