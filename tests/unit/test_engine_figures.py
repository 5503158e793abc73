"""The engines' own figures, as /metrics shows them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from gateway.engine_link import EngineLink
from gateway.metrics import GatewayMetrics
from shared.identifiers import EngineEpoch, EngineId, GatewayId
from shared.messages import EngineHello, EngineLoad
from shared.redis_schema import EngineRecord
from shared.tokenizer import Tokenizer

LOAD = EngineLoad(3, 0, 1, 4, 0, max_num_seqs_now=64, max_num_tokens_now=512)


async def _no_tokenizer(hello: EngineHello) -> Tokenizer:
    raise AssertionError("nobody has said hello")


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def figures(context: zmq.asyncio.Context, loads: dict[str, EngineLoad]) -> dict[tuple[str, str], float]:
    """By name of the figure and engine. The links are real, and connected to nothing."""
    links = []
    for engine_id, load in loads.items():
        record = EngineRecord(
            EngineId(engine_id), EngineEpoch("e"), "tcp://127.0.0.1:1", "m", "ready", 1, None
        )
        link = EngineLink(record, context, GatewayId("g"), [], _no_tokenizer)
        link.load = load
        links.append(link)
    text = GatewayMetrics(lambda: links, lambda: 1).exposition().decode()
    return {
        (sample.name, sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "engine" in sample.labels
    }


async def test_the_limits_and_whether_a_target_is_met_are_shown(context: zmq.asyncio.Context) -> None:
    slow = msgspec.structs.replace(
        LOAD, max_num_seqs_now=2, max_num_tokens_now=18, decode_step_p95_ms=250.0, meets_itl_target=False
    )
    quick = msgspec.structs.replace(slow, decode_step_p95_ms=50.0, meets_itl_target=True)
    found = await figures(context, {"slow": slow, "quick": quick})
    assert found["headrace_engine_max_num_seqs", "slow"] == 2
    assert found["headrace_engine_max_num_tokens", "slow"] == 18
    assert found["headrace_engine_decode_step_p95_seconds", "slow"] == 0.25
    assert found["headrace_engine_meets_itl_target", "slow"] == 0
    assert found["headrace_engine_meets_itl_target", "quick"] == 1


async def test_a_figure_that_an_engine_does_not_have_is_left_out(context: zmq.asyncio.Context) -> None:
    """An engine without a target would else look like one that misses it."""
    found = await figures(context, {"fixed": LOAD, "older": EngineLoad(0, 0, 1, 4, 0)})
    assert found["headrace_engine_max_num_seqs", "fixed"] == 64
    assert found["vllm:num_requests_running", "older"] == 0
    assert ("headrace_engine_meets_itl_target", "fixed") not in found
    assert not [
        name for name, engine in found if engine == "older" and name.startswith("headrace_engine_max")
    ]
