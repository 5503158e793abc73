"""The alert rules of `headrace plan` against real gateways: their metrics exist, and faults raise alarms."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client import OpenAIClient, Target
from loadtest.datasets.prompt import Prompt
from loadtest.generator import ClosedLoop, generate_load
from loadtest.plan.alert_rules import AlertRule, Timing, alert_rules, rules_document
from loadtest.plan.autoscaler import adapter_document, in_flight_expression
from loadtest.plan.measurement import measure
from loadtest.plan.plan_files import yaml_text
from loadtest.plan.thresholds import Thresholds, thresholds_of
from tests.knee_results import knee_result, simulated_probe
from tests.prometheus_server import Prometheus, needs_prometheus, running_prometheus
from tests.stack import Stack, wait_until

QUICK = "step_base_ms=2,step_per_sequence_ms=0,step_per_prefill_token_ms=0"
FAULTS: dict[str, tuple[dict[str, Any], int]] = {  # of a model: its fields, and how many requests at once
    "calm": ({"source": f"sim:{QUICK}"}, 1),
    "slow": ({"source": f"sim:{QUICK},ttft_floor_ms=800"}, 1),
    "crawling": ({"source": "sim:step_base_ms=90"}, 1),
    "crowded": ({"source": "sim:step_base_ms=20", "max_num_seqs": 4}, 12),
    "full": ({"source": "sim:step_base_ms=20", "num_gpu_blocks_override": 60, "max_model_len": 320}, 16),
    "stuck": ({"source": f"sim:{QUICK},stall_s=300,stall_after_requests=2"}, 1),
    "failing": ({"source": f"sim:{QUICK},abort_share=1"}, 1),
    "gone": ({"source": f"sim:{QUICK}"}, 1),
}
EXPECTED = {
    ("HeadraceSlowFirstToken", "slow"),
    ("HeadraceSlowTokens", "crawling"),
    ("HeadraceRunningNearCapacity", "crowded"),
    ("HeadraceQueueGrows", "crowded"),
    ("HeadraceNearCapacity", "crowded"),
    ("HeadraceKvCacheNearlyFull", "full"),
    ("HeadraceUpButNotServing", "stuck"),
    ("HeadraceErrors", ""),
    ("HeadraceNoEngine", "gone"),
}
# The simulator's own speed, and a stack's: faults show within seconds, and so they may here.
TIMING = Timing(window_s=10, pending_s=4, stuck_pending_s=2, stuck_window_s=5)


def measured_limits() -> Thresholds:
    result = knee_result(probes=[simulated_probe(rate, seed=int(rate)) for rate in (8.0, 14.0)])
    return thresholds_of(measure(result, result.tiers[0]))


def rules_of(**limits: Any) -> list[AlertRule]:
    rules, left_out = alert_rules(replace(measured_limits(), e2el_s=20.0, **limits), timing=TIMING)
    assert not left_out
    return rules


def document_of(*models: str) -> dict[str, Any]:
    return {"models": [{"name": name, **FAULTS[name][0]} for name in models]}


def ask(stack: Stack, model: str, num_requests: int, at_once: int, num_tokens: int = 12) -> None:
    target = Target(
        f"{stack.url}/v1/chat/completions",
        "openai-chat",
        model,
        headers={"Authorization": f"Bearer {stack.key()}"},
        ignore_eos=True,
    )
    prompts = [Prompt(f"{number:06d} of {model}", num_tokens) for number in range(num_requests)]

    async def asked() -> None:
        async with OpenAIClient(target) as client:
            await generate_load(prompts, ClosedLoop(at_once), client.send)

    asyncio.run(asked())


def selectors(expression: Any) -> Iterator[Any]:
    """All vector selectors below an expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (inside := getattr(expression, name, None)) is not None:
            yield from selectors(inside)
    for inside in getattr(expression, "args", None) or ():
        yield from selectors(inside)


def test_every_metric_and_label_in_the_rules_is_on_a_gateways_page(redis_url: str) -> None:
    with Stack(redis_url, document_of("calm")) as stack:
        ask(stack, "calm", 2, 1)
        _, page = stack.get("/metrics")
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    expressions = [rule.expression for rule in rules_of()]
    expressions += [
        in_flight_expression("calm"),
        adapter_document(None)["rules"]["external"][0]["metricsQuery"],
    ]
    found = [one for text in expressions for one in selectors(promql_parser.parse(text))]
    assert len(found) > 20
    for one in found:
        assert one.name in samples, one.name
        for matcher in one.matchers.matchers:
            assert matcher.name in samples[one.name], (one.name, matcher.name)
    assert {"model_name", "engine"} <= samples["vllm:num_requests_running"]
    assert {"route", "variant", "le"} <= samples["headrace_variant_time_per_output_token_seconds_bucket"]


@contextlib.contextmanager
def constant_load(stack: Stack, *models: str) -> Iterator[None]:
    """Each model is asked again and again, by threads that end with the context."""
    is_over = threading.Event()

    def keep_asking(model: str) -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):  # its gateway may be gone: that is what is tested
                at_once = FAULTS[model][1]
                ask(stack, model, 4 * at_once, at_once, 200 if model in ("full", "crowded") else 12)

    threads = [threading.Thread(target=keep_asking, args=(model,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()


@pytest.mark.soak
@needs_prometheus
@pytest.mark.timeout(400)
def test_each_injected_fault_raises_its_alarm_within_its_time_and_a_minute(
    redis_url: str, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yml"
    # Light thresholds: what is planted is a crowd of 12 in front of 4 places, not a real overload.
    made = rules_of(running=3.0, waiting=2.0, in_flight=6.0)
    rules.write_text(yaml_text([rules_document(made)], "of a test"))
    with Stack(redis_url, document_of(*FAULTS)) as stack:
        target = stack.url.removeprefix("http://")
        with running_prometheus(tmp_path / "prometheus", rules, [target]) as prometheus:
            with constant_load(stack, "calm"):
                settle(prometheus, TIMING.window_s + TIMING.pending_s)
                assert prometheus.firing() == set(), "nothing is wrong yet"
            with constant_load(stack, *FAULTS):
                stack.kill("gone-0")
                began_s = time.monotonic()
                wait_for(prometheus, EXPECTED, TIMING.pending_s + 60)
                assert time.monotonic() - began_s < TIMING.pending_s + 60
                about_calm = {alert for alert in prometheus.firing() if alert[1] == "calm"}
                assert about_calm == set()
            stack.kill("gateway")
            wait_for(prometheus, {("HeadraceNoGateway", "")}, TIMING.stuck_pending_s + 60)


def settle(prometheus: Prometheus, seconds: float) -> None:
    """Until it has scraped for so long: by its own count, not by ours."""
    query = "count_over_time(headrace_requests_in_flight[1h])"
    wait_until(lambda: (prometheus.value(query) or 0) >= seconds, seconds + 60, "scrapes")


def wait_for(prometheus: Prometheus, alerts: set[tuple[str, str]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while missing := alerts - prometheus.firing():
        assert time.monotonic() < deadline, f"did not fire: {missing}; did: {prometheus.firing()}"
        time.sleep(0.5)
