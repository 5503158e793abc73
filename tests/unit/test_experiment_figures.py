"""The keeper of experiments: its sums are those of the definition, and Redis may be away for a while."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import redis.asyncio

from compose.experiment.figures import ExperimentFigures as ReadFigures
from compose.experiment.figures import ExperimentName, ExperimentStore
from gateway import experiment_figures
from gateway.breaker import RedisBreaker
from gateway.experiment_figures import ExperimentFigures
from gateway.ledger import Ledger
from gateway.request_account import RequestAccount
from gateway.routing.draw import Draw
from shared.config import RouteConfig, VariantConfig
from shared.experiment_figures import (
    MAX_SUBJECT_WEIGHT,
    NUM_CLUSTERS,
    NUM_SUBJECT_CELLS,
    ExperimentRecord,
    cell_of,
    cluster_of,
    sum_of,
)
from shared.identifiers import EngineId, GatewayId, TenantId
from shared.redis_client import connect, connect_async
from shared.redis_schema import RedisKeys
from shared.usage import UsageRecord

ROUTE = RouteConfig(
    name="chat",
    split=[
        VariantConfig(variant="a", model="m", weight=1),
        VariantConfig(variant="b", model="m", weight=3),
    ],
)
DRAW = Draw(ROUTE, [1.0, 3.0])
NAME = ExperimentName("chat", 1)


class Gateway:
    """One life of one, as far as its experiments go."""

    def __init__(self, redis_url: str, keys: RedisKeys, name: str = "gateway-1") -> None:
        self._breaker_clock = 0.0
        self.client = connect_async(redis_url, 2000)
        breaker = RedisBreaker(clock=self._clock)
        self.figures = ExperimentFigures(self.client, keys, breaker, GatewayId(name))

    def _clock(self) -> float:
        self._breaker_clock += 10.0  # an open breaker lets the next call try
        return self._breaker_clock


class World:
    def __init__(self, redis_url: str, namespace: str) -> None:
        self.redis_url = redis_url
        self.keys = RedisKeys(namespace)
        self.redis = connect(redis_url, 2000)
        self._gateways: list[Gateway] = []

    def gateway(self, name: str = "gateway-1", redis_url: str | None = None) -> Gateway:
        self._gateways.append(Gateway(redis_url or self.redis_url, self.keys, name))
        return self._gateways[-1]

    def read(self) -> ReadFigures | None:
        return ExperimentStore(self.redis, self.keys).read(NAME)

    async def close(self) -> None:
        for gateway in self._gateways:
            await gateway.client.aclose()
        self.redis.close()


@pytest.fixture
async def world(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(redis_url, f"test-{request.node.name}")
    yield world
    await world.close()


def record(subject_hash: int = 7, variant: str = "a", **fields: Any) -> UsageRecord:
    return UsageRecord(
        **{
            "request_id": "r",
            "arrived_at": 1e9,
            "tenant": TenantId("t"),
            "key_id": "k",
            "operation": "chat",
            "route": "chat",
            "experiment_version": 1,
            "assigned_variant": variant,
            "variant": variant,
            "model": "m",
            "engine_id": EngineId("m-0"),
            "subject_hash": subject_hash,
            "time_to_first_token_s": 0.5,
            "duration_s": 2.0,
            "generation_s": 1.0,
            "input_tokens": 10,
            "output_tokens": 11,
            "finish_reasons": ["stop"],
            **fields,
        }
    )


async def test_sums_kept_one_by_one_are_those_of_the_definition(world: World):
    rng = np.random.default_rng(1)
    gateway = world.gateway()
    hashes = rng.integers(2**63, size=40)
    values: dict[int, list[float]] = {}
    for number in rng.integers(40, size=1500) ** 2 // 40:  # some ask far more often than others
        time_s = float(np.exp(rng.normal()))
        values.setdefault(int(hashes[number]), []).append(math.log(time_s))
        gateway.figures.keep(record(int(hashes[number]), time_to_first_token_s=time_s), DRAW)
    await gateway.figures.flush()
    weights, products = np.zeros(NUM_CLUSTERS), np.zeros(NUM_CLUSTERS)
    for subject, logarithms in values.items():
        weight = min(len(logarithms), MAX_SUBJECT_WEIGHT)
        weights[cluster_of(subject)] += weight
        products[cluster_of(subject)] += weight * np.mean(logarithms)
    assert max(map(len, values.values())) > 3 * MAX_SUBJECT_WEIGHT
    read = world.read()
    assert read is not None
    sums = read.record.variants["a"].clusters["ttft"]
    assert sums.weights == pytest.approx(weights)
    assert sums.sums == pytest.approx(products)
    assert read.num_subjects == len(values)


async def test_a_request_counts_for_the_variant_it_was_assigned_and_is_told_of_the_one_that_served(
    world: World,
):
    gateway = world.gateway()
    gateway.figures.keep(record(assigned_variant="a", variant="b", outcome="failed"), DRAW)
    await gateway.figures.flush()
    read = world.read()
    assert read is not None
    a, b = read.record.variants["a"], read.record.variants["b"]
    assert (a.assigned.requests, a.served.requests) == (1, 0)
    assert (b.assigned.requests, b.served.requests) == (0, 1)
    assert sum(a.clusters["failed"].sums) == 1
    assert "failed" not in b.clusters
    assert a.assigned.outcomes == {"failed": 1}
    assert "e2e" not in a.clusters  # an answer that broke off has no whole time


def account(draw: Draw | None) -> RequestAccount:
    return RequestAccount(
        request_id="r",
        tenant=TenantId("t"),
        key_id="k",
        operation="chat",
        route="chat",
        experiment_version=1,
        assigned_variant="a",
        variant="a",
        model="m",
        subject_hash=7,
        arrived_at=time.monotonic(),
        draw=draw,
    )


@pytest.mark.parametrize("outcome", [(200, None), (400, "invalid_value"), (503, "unavailable"), (499, None)])
async def test_who_was_drawn_from_no_split_does_not_count_however_it_ends(
    world: World, outcome: tuple[int, str | None]
):
    gateway = world.gateway()
    ledger = Ledger([], [gateway.figures.keep])
    drawn = account(DRAW)
    ledger.close(account(None), *outcome)
    ledger.close(drawn.of_shadow("b", "m"), *outcome)
    await gateway.figures.flush()
    assert world.read() is None
    assert ExperimentStore(world.redis, world.keys).names() == []
    ledger.close(drawn, *outcome)
    await gateway.figures.flush()
    assert world.read() is not None


async def test_a_request_counts_for_the_split_it_was_drawn_from_whatever_the_route_is_now(world: World):
    """Half of them ended after the route had got other weights and another variant in the place of one."""
    gateway = world.gateway()
    changed = RouteConfig(
        name="chat", split=[ROUTE.split[0], VariantConfig(variant="c", model="m"), *ROUTE.split[1:]]
    )
    for number in range(40):
        gateway.figures.keep(record(number << 32, response_id=f"id-{number}"), DRAW)
        gateway.figures.keep(record((100 + number) << 32, "c"), Draw(changed, [1.0, 1.0, 0.0]))
    await gateway.figures.flush()
    read = world.read()
    assert read is not None
    assert read.record.split.counted == {"a": 40, "c": 40}
    assert read.record.split.expected == pytest.approx({"a": 10 + 20, "b": 30, "c": 20})


async def test_without_any_weight_there_is_nothing_to_compare_a_subject_with(world: World):
    gateway = world.gateway()
    gateway.figures.keep(record(), Draw(ROUTE, [0.0, 0.0]))
    await gateway.figures.flush()
    read = world.read()
    assert read is not None
    assert read.record.split.counted == {}
    assert read.record.variants["a"].assigned.requests == 1


async def test_a_refused_request_is_counted_and_is_no_failure(world: World):
    gateway = world.gateway()
    gateway.figures.keep(record(outcome="refused", time_to_first_token_s=None), DRAW)
    await gateway.figures.flush()
    read = world.read()
    assert read is not None
    assert read.record.variants["a"].assigned.outcomes == {"refused": 1}
    assert read.record.variants["a"].clusters == {}


async def test_replicas_and_later_lives_of_them_add_up_and_a_subject_counts_once(world: World):
    for name in ("gateway-1", "gateway-2", "gateway-3"):
        gateway = world.gateway(name)
        for number in range(100):
            gateway.figures.keep(record(number << 32), DRAW)
        await gateway.figures.flush()
        await gateway.figures.flush()
    read = world.read()
    assert read is not None
    assert read.record.variants["a"].assigned.requests == 300
    assert read.record.split.counted == {"a": 100}
    assert read.record.split.expected == pytest.approx({"a": 25, "b": 75})
    assert read.num_subjects == 100


async def test_a_write_that_is_repeated_counts_nothing_twice(world: World):
    """As it happens when Redis takes a write, but its answer does not come in time."""
    gateway = world.gateway()
    gateway.figures.keep(record(), DRAW)
    pipeline_of = gateway.client.pipeline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.client, "pipeline", lambda **options: _Deaf(pipeline_of(**options)))
        await gateway.figures.flush()
        await gateway.figures.flush()
    await gateway.figures.flush()
    await gateway.figures.flush()
    read = world.read()
    assert read is not None
    assert read.record.variants["a"].assigned.requests == 1
    assert sum(read.record.split.counted.values()) <= 1  # whose answer was lost does not count for the split


class _Deaf:
    """A pipeline whose commands arrive, and whose answers do not."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self._pipe, name)

    async def __aenter__(self) -> _Deaf:
        await self._pipe.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pipe.__aexit__(*error)

    async def execute(self) -> None:
        await self._pipe.execute()
        raise redis.exceptions.TimeoutError("the answer did not come")


async def test_nothing_is_lost_while_redis_is_away(world: World):
    away = world.gateway(redis_url="redis://127.0.0.1:1")
    for number in range(20):
        away.figures.keep(record(number << 32, response_id=f"id-{number}"), DRAW)
    await away.figures.flush()
    assert world.read() is None
    away.figures._client = world.gateway().client  # it is back
    away.figures.keep(record(99 << 32), DRAW)
    await away.figures.flush()
    read = world.read()
    assert read is not None
    assert read.record.variants["a"].assigned.requests == 21
    assert read.record.split.counted == {"a": 20} or read.record.split.counted == {"a": 21}
    assert (
        world.redis.exists(*(world.keys.answer(TenantId("t"), f"id-{number}") for number in range(20))) == 20
    )


async def test_what_waits_for_redis_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiment_figures, "MAX_PENDING_ANSWERS", 10)
    monkeypatch.setattr(experiment_figures, "MAX_PENDING_CELLS", 10)
    monkeypatch.setattr(experiment_figures, "MAX_SUBJECTS", 10)
    gateway = world.gateway(redis_url="redis://127.0.0.1:1")
    for number in range(30):
        gateway.figures.keep(record(number << 32, response_id=f"id-{number}"), DRAW)
    await gateway.figures.flush()
    assert gateway.figures.pending_answer(TenantId("t"), "id-19") is None  # the oldest have been given up
    assert gateway.figures.pending_answer(TenantId("t"), "id-29") is not None
    [experiment] = gateway.figures._experiments.values()
    assert len(experiment.pending_cells) == 10
    assert len(experiment._subjects) == 10
    assert experiment.record.variants["a"].assigned.requests == 30


async def test_an_experiment_without_requests_leaves_the_memory_and_its_next_life_takes_nothing_away(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    gateway = world.gateway()
    gateway.figures.keep(record(), DRAW)
    await gateway.figures.flush()
    monkeypatch.setattr(experiment_figures, "FORGOTTEN_AFTER_S", -1.0)
    await gateway.figures.flush()
    assert not gateway.figures._experiments
    gateway.figures.keep(record(), DRAW)
    await gateway.figures.flush()
    read = world.read()
    assert read is not None
    assert read.record.variants["a"].assigned.requests == 2
    assert read.record.split.counted == {"a": 1}


def test_a_record_of_a_large_experiment_stays_small_whoever_asks():
    """Of 8,000 requests of as many subjects: the record does not grow with them."""
    experiment = experiment_figures.Experiment("life", 0.0)
    rng = np.random.default_rng(2)
    sizes = []
    for _ in range(2):
        for subject in rng.integers(2**63, size=4000):
            variant = "ab"[int(subject) % 2]
            times = np.exp(rng.normal(size=3))
            experiment.add(
                record(
                    int(subject),
                    variant,
                    time_to_first_token_s=float(times[0]),
                    duration_s=float(times[1]),
                    generation_s=float(times[2]),
                ),
                DRAW,
            )
        sizes.append(len(msgspec.json.encode(experiment.record)))
    print(f"{sizes[-1]:,} bytes for two variants")
    assert sizes[-1] < 300_000
    assert sizes[-1] < 1.3 * sizes[0]


def test_cells_and_clusters_of_a_subject_are_told_by_different_bits():
    """So that the subjects that count for the split are not those of a few clusters."""
    rng = np.random.default_rng(3)
    hashes = [int(one) for one in rng.integers(2**64, size=4000, dtype=np.uint64)]
    assert len({cluster_of(one) for one in hashes if cell_of(one) < NUM_SUBJECT_CELLS // 8}) > 150


def test_records_survive_json_and_add_up():
    experiment = experiment_figures.Experiment("life", 5.0)
    experiment.add(record(), DRAW)
    experiment.record.split.count("a", {"a": 0.25, "b": 0.75})
    text = msgspec.json.encode(experiment.record)
    total = sum_of(msgspec.json.decode(text, type=ExperimentRecord) for _ in range(3))
    assert total is not None
    assert total.variants["a"].assigned.output_tokens == 33
    assert sum(total.variants["a"].histograms["ttft"][7].values()) == 3
    assert total.split.products["a"]["b"] == pytest.approx(3 * 0.25 * 0.75)
    assert total.began_at == 5.0


async def test_records_of_old_lives_are_put_together_and_nothing_is_lost(world: World):
    num_lives = 30
    for number in range(num_lives):
        gateway = world.gateway(f"gateway-{number:02}")
        gateway.figures.keep(record(number << 32), DRAW)
        await gateway.figures.flush()
    before = world.read()
    assert before is not None
    key = world.keys.experiment("chat", 1)
    assert world.redis.hlen(key) == num_lives
    much_later = ExperimentStore(world.redis, world.keys, clock=lambda: time.time() + 8 * 86_400)
    assert much_later.read(NAME) == before
    assert world.redis.hlen(key) == 1
    assert world.redis.ttl(key) > 0
    later = world.gateway("gateway-99")
    later.figures.keep(record(98 << 32), DRAW)
    await later.figures.flush()
    read = much_later.read(NAME)
    assert read is not None
    assert read.record.variants["a"].assigned.requests == num_lives + 1
