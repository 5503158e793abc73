"""Copies run beside their requests, within their bounds, and each of them is accounted for."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.engine_link import EngineLink
from gateway.engine_pool import EnginePool
from gateway.errors import overloaded
from gateway.ledger import Ledger
from gateway.metrics import GatewayMetrics
from gateway.request_account import RequestAccount
from gateway.routing.shadow import Copy, ShadowTraffic, is_sampled
from shared.config import RouteConfig, ShadowConfig, VariantConfig
from shared.identifiers import TenantId
from shared.usage import UsageRecord


class Engines:
    """The engines of the shadow's model, by how many requests wait at each: None if it has not told."""

    def __init__(self, *waiting: int | None) -> None:
        self._waiting = waiting

    def ready(self, model: str) -> list[EngineLink]:
        loads = [None if number is None else SimpleNamespace(num_waiting=number) for number in self._waiting]
        return [cast("EngineLink", SimpleNamespace(load=load)) for load in loads] if model == "b" else []


class World:
    """One route with a shadow, of which every request is sampled."""

    def __init__(self, *waiting: int | None, max_in_flight: int = 2, timeout_s: float = 60.0) -> None:
        self.records: list[UsageRecord] = []
        self.metrics = GatewayMetrics(lambda: [], lambda: 1)
        self.shadows = ShadowTraffic(
            cast("EnginePool", Engines(*waiting)), Ledger([self.records.append]), self.metrics
        )
        self.route = RouteConfig(
            name="chat",
            split=[
                VariantConfig(variant="main", model="a"),
                VariantConfig(variant="dark", model="b", weight=0),
            ],
            shadow=ShadowConfig(
                variant="dark", percent=100, max_in_flight=max_in_flight, timeout_s=timeout_s
            ),
        )

    def offer(self, copy: Copy, *, variant: str = "main", is_draining: bool = False) -> RequestAccount:
        account = RequestAccount(
            request_id="req-1",
            tenant=TenantId("acme"),
            key_id="key_1",
            operation="chat",
            route="chat",
            experiment_version=1,
            assigned_variant=variant,
            variant=variant,
            model="a",
            subject_hash=5,
            arrived_at=time.monotonic(),
        )
        self.shadows.offer(self.route, account, copy, is_draining=is_draining)
        return account

    @property
    def outcomes(self) -> dict[str, int]:
        families = {
            (sample.labels["route"], sample.labels["variant"], sample.labels["outcome"]): int(sample.value)
            for sample in next(iter(self.metrics.shadow_requests.collect())).samples
            if sample.name.endswith("_total")
        }
        assert all(key[:2] == ("chat", "dark") for key in families)
        return {outcome: number for (_, _, outcome), number in families.items()}


@pytest.fixture
async def gate() -> AsyncIterator[asyncio.Event]:
    event = asyncio.Event()
    yield event
    event.set()


def waits_for(gate: asyncio.Event) -> Copy:
    async def copy(_variant: Any, _engine: Any, _account: Any) -> None:
        await gate.wait()

    return copy


async def succeeds(_variant: VariantConfig, _engine: EngineLink, account: RequestAccount) -> None:
    account.generated([])


async def test_a_copy_has_an_account_of_its_own_which_is_a_shadows():
    world = World(0)
    account = world.offer(succeeds)
    await world.shadows.settled()
    assert world.outcomes == {"attempted": 1, "succeeded": 1}
    [record] = world.records
    assert (record.is_shadow, record.variant, record.model, record.outcome) == (True, "dark", "b", "ok")
    assert (record.request_id, record.tenant, record.subject_hash) == ("req-1", "acme", 5)
    assert (account.variant, account.is_closed, account.first_token_at) == ("main", False, None)


async def test_a_copy_that_fails_is_counted_and_nobody_else_hears_of_it(caplog: pytest.LogCaptureFixture):
    async def is_refused(*_: Any) -> None:
        raise overloaded("5 requests are waiting already")

    async def is_broken(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    world = World(0)
    world.offer(is_refused)
    world.offer(is_broken)
    await world.shadows.settled()
    assert world.outcomes == {"attempted": 2, "failed": 2}
    assert [(each.status, each.error_code) for each in world.records] == [
        (429, "overloaded"),
        (500, "internal_error"),
    ]
    assert "a fault of ours" in caplog.text  # who runs the gateway does


async def test_beyond_what_may_be_in_flight_copies_are_dropped_until_one_has_ended(gate: asyncio.Event):
    world = World(0, max_in_flight=2)
    for _ in range(5):
        world.offer(waits_for(gate))
    assert world.outcomes == {"attempted": 2, "dropped": 3}
    gate.set()
    await world.shadows.settled()
    world.offer(succeeds)
    await world.shadows.settled()
    assert world.outcomes == {"attempted": 3, "dropped": 3, "succeeded": 3}


@pytest.mark.parametrize(
    ("waiting", "outcome"), [((1, 4), "dropped"), ((1, 0), "attempted"), ((), "dropped")]
)
async def test_a_copy_is_dropped_where_it_would_have_to_wait(
    waiting: tuple[int, ...], outcome: str, gate: asyncio.Event
):
    world = World(*waiting)
    world.offer(waits_for(gate))
    assert world.outcomes == {outcome: 1}


async def test_a_gateway_that_drains_begins_no_copies_and_a_variant_has_none_of_its_own_answers():
    world = World(0)
    world.offer(succeeds, is_draining=True)
    world.offer(succeeds, variant="dark")
    assert world.outcomes == {"dropped": 2}
    assert not world.records


async def test_a_copy_that_takes_too_long_is_ended(gate: asyncio.Event):
    world = World(0, timeout_s=0.01)
    world.offer(waits_for(gate))
    await asyncio.wait_for(world.shadows.settled(), 5)
    assert world.outcomes == {"attempted": 1, "failed": 1}
    assert world.records[0].error_code == "timeout"


async def test_when_the_gateway_ends_so_do_its_copies(gate: asyncio.Event):
    world = World(0)
    world.offer(waits_for(gate))
    await asyncio.sleep(0)  # it has begun
    world.offer(waits_for(gate))  # and this one has not
    await asyncio.wait_for(world.shadows.close(), 5)
    assert world.outcomes == {"attempted": 2, "failed": 2}
    assert [record.outcome for record in world.records] == ["aborted", "aborted"]


def test_as_many_requests_are_sampled_as_the_route_says_and_the_same_ones_again():
    ids = [f"req-{number}" for number in range(20_000)]
    sampled = [each for each in ids if is_sampled("chat", each, 2.5)]
    assert abs(len(sampled) - 500) <= 3 * (20_000 * 0.025 * 0.975) ** 0.5
    assert sampled == [each for each in ids if is_sampled("chat", each, 2.5)]
    assert set(sampled) < {each for each in ids if is_sampled("chat", each, 5)}
    assert all(is_sampled("chat", each, 100) for each in ids)


async def test_outcomes_add_up():
    world = World(0)
    for _ in range(20):
        world.offer(succeeds)
        await asyncio.sleep(0)
    await world.shadows.settled()
    outcomes = Counter(world.outcomes)
    assert outcomes["attempted"] + outcomes["dropped"] == 20
    assert outcomes["attempted"] == outcomes["succeeded"] + outcomes["failed"] == len(world.records)
