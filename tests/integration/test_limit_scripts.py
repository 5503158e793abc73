"""The scripts of the limits in a real Valkey, against a model in Python and against what limits promise."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from gateway.limits.dimensions import Dimension, Dimensions, Kind, dimensions_of
from gateway.limits.script_channel import Call, Lane, Pulse, Script
from shared.config import Limits, TenantConfig
from shared.identifiers import TenantId
from shared.redis_client import connect, connect_async
from shared.redis_schema import RedisKeys
from tests.limit_model import DAY_US, MINUTE_US, LimitModel, Result
from tests.valkey_server import running_valkey

LEASE_US = 10_000_000
START_US = 20_787 * DAY_US + 43_200_000_000  # at noon


class ScriptedWorld:
    """One tenant's state in Valkey, whose scripts read a clock that the test sets, and the model of it."""

    def __init__(self, client: redis.Redis, limits: dict[str, Any]) -> None:
        self.client = client
        self.keys = RedisKeys(f"test-{uuid.uuid4().hex[:10]}")
        self.tenant = TenantId("t")
        self._clock = f"{self.keys.gateways}:clock"
        self._tenant_config = TenantConfig.model_validate({"name": "t", **limits})
        self.model = LimitModel(LEASE_US)
        self._scripts = {
            name: client.register_script(
                Script(f"{name}.lua").text.replace(
                    "redis.call('TIME')", f"redis.call('LRANGE', '{self._clock}', 0, 1)"
                )
            )
            for name in ("reserve", "settle", "renew", "sweep")
        }
        self.set_clock(START_US)

    def dimensions(self, route: str = "r", key: str = "k") -> Dimensions:
        return dimensions_of(self._tenant_config, route, key, None, self.keys, "fail_open")

    def set_clock(self, now_us: int) -> None:
        self.model.now = now_us
        self.client.delete(self._clock)
        self.client.rpush(self._clock, *divmod(now_us, 1_000_000))

    def advance(self, by_us: int) -> None:
        self.set_clock(self.model.now + by_us)

    def reserve(self, its_id: str, dimensions: Dimensions, input_tokens: int, output_tokens: int) -> Result:
        """As both say."""
        self.model.sweep()
        expected = self.model.reserve(its_id, dimensions, input_tokens, output_tokens)
        reply = self._run("sweep", dimensions, 256, "0") and self._run(
            "reserve",
            dimensions,
            msgspec.msgpack.encode((LEASE_US, dimensions.packed, [(its_id, input_tokens, output_tokens)])),
        )
        [(status, refusing, wait_us, shadows, _)] = msgspec.msgpack.decode(reply)
        told = Result(
            status == 1,
            dimensions.all[refusing - 1] if refusing else None,
            wait_us,
            [dimensions.all[index - 1] for index in shadows],
        )
        assert told == expected
        return told

    def settle(
        self, its_id: str, dimensions: Dimensions, usage: tuple[int, int], *, is_unsure: bool = False
    ) -> bool:
        expected = self.model.settle(its_id, usage, is_unsure=is_unsure)
        told = [(its_id, *usage, int(is_unsure))]
        num_settled = self._run("settle", dimensions, msgspec.msgpack.encode((LEASE_US, told)))
        assert num_settled == int(expected)
        return expected

    def renew(self, its_id: str, dimensions: Dimensions, output_so_far: int) -> None:
        self.model.renew(its_id, dimensions, output_so_far)
        told = [(its_id, output_so_far, 0, 0)]
        self._run("renew", dimensions, msgspec.msgpack.encode((LEASE_US, dimensions.packed, told)))

    def check(self) -> None:
        """Valkey holds what the model says."""
        accounts_key, reservations_key, leases_key = self.keys.limit_state(self.tenant)
        accounts = {
            name.decode(): tuple(map(float, value.split()))
            for name, value in self.client.hgetall(accounts_key).items()
        }
        model = {**self.model.rates, **self.model.days}
        assert accounts == model
        assert {each.decode() for each in self.client.hkeys(reservations_key)} == self.model.kept.keys()
        leases = {
            its_id.decode(): int(score)
            for its_id, score in self.client.zrange(leases_key, 0, -1, withscores=True)
        }
        assert leases == self.model.leases

    def _run(self, name: str, dimensions: Dimensions, *arguments: Any) -> Any:
        keys = dimensions.redis_keys[:3] if name == "sweep" else dimensions.redis_keys
        return self._scripts[name](list(keys), list(arguments))


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url, 2000) as client:
        yield client


LIMITS: list[dict[str, Any]] = [
    {"requests_per_minute": 7, "tokens_per_minute": 900, "max_concurrency": 3},
    {
        "tokens_per_minute": 1000,
        "tokens_per_day": 4000,
        "key_limits": {"output_tokens_per_minute": 700, "max_concurrency": 2},
        "route_limits": {"r": {"input_tokens_per_minute": 333, "requests_per_minute": 60, "burst": 3}},
    },
    {
        "requests_per_minute": 30,
        "tokens_per_minute": 600,
        "max_concurrency": 2,
        "shadow": ["tokens_per_minute", "max_concurrency"],
        "key_limits": {"tokens_per_minute": 800},
    },
]


def run_random_world(client: redis.Redis, seed: int, num_operations: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    world = ScriptedWorld(client, LIMITS[seed % len(LIMITS)])
    plans = [world.dimensions(route, key) for route in ("r", "other") for key in ("k", "k2")]
    running: dict[str, Dimensions] = {}
    for number in range(num_operations):
        match draw.choice(("wait", "reserve", "reserve", "reserve", "settle", "settle", "renew", "die")):
            case "wait":
                longest = draw.choice((1_000, 1_000_000, 15_000_000, 90_000_000))
                world.advance(draw.randrange(longest))
            case "reserve":
                dimensions, its_id = draw.choice(plans), f"id-{number}"
                tokens = draw.randrange(400), draw.randrange(300)
                told = world.reserve(its_id, dimensions, *tokens)
                if told.is_admitted:
                    running[its_id] = dimensions
                elif told.wait_us > 0 and told.refusing is not None and told.refusing.kind is Kind.RATE:
                    retry_as_told(world, its_id, dimensions, tokens, told, running)
            case "settle" if running:
                its_id = draw.choice(list(running))
                usage = draw.randrange(400), draw.randrange(500)
                dimensions = running.pop(its_id)
                world.settle(its_id, dimensions, usage, is_unsure=draw.random() < 0.2)
                assert not world.settle(its_id, dimensions, usage), "settled twice"
            case "renew" if running:
                its_id = draw.choice(list(running))
                world.renew(its_id, running[its_id], draw.randrange(300))
            case "die" if running and draw.random() < 0.3:
                running.pop(draw.choice(list(running)))
        world.check()


def retry_as_told(
    world: ScriptedWorld,
    its_id: str,
    dimensions: Dimensions,
    tokens: tuple[int, int],
    told: Result,
    running: dict[str, Dimensions],
) -> None:
    """Whoever waits as long as is said passes, unless slots are short or what died meanwhile was charged."""
    num_reservations = len(world.model.kept)
    world.advance(told.wait_us)
    world.model.sweep()
    again = world.reserve(its_id, dimensions, *tokens)
    if again.is_admitted:
        running[its_id] = dimensions
    else:
        assert again.refusing is not None
        has_swept = len(world.model.kept) < num_reservations
        assert again.refusing.kind is Kind.SLOTS or has_swept, again


@pytest.mark.parametrize("seed", range(15))
def test_the_scripts_do_what_the_model_does(client, seed):
    run_random_world(client, seed, 80)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_the_scripts_do_what_the_model_does_for_long(client, seed):
    run_random_world(client, seed, 400)


# ---------------------------------------------------------------------- what limits promise


class Taken:
    """What was let in, with what it took in the end."""

    def __init__(self, at_us: int, tokens: int) -> None:
        self.at_us = at_us
        self.tokens = tokens


def run_refunding_model(seed: int) -> None:
    """Requests that reserve more than they take, in the model alone, which is quick: in no stretch of time is
    more let in than the rate times its length and one burst."""
    draw = random.Random(seed)
    limit = draw.choice((60, 1000, 90_000))
    tenant = TenantConfig(name="t", tokens_per_minute=limit)
    dimensions = dimensions_of(tenant, "r", "k", None, RedisKeys("x"), "fail_open")
    model = LimitModel(10**12)
    model.now = START_US
    running: dict[str, tuple[Taken, int]] = {}
    taken: list[Taken] = []
    for number in range(150):
        if running and draw.random() < 0.45:
            its_id = draw.choice(list(running))
            its, reserved = running.pop(its_id)
            its.tokens = draw.choice((0, draw.randrange(reserved + 1), reserved))
            model.settle(its_id, (its.tokens, 0))
        else:
            reserved = draw.randrange(1, limit + 1)
            if model.reserve(f"{number}", dimensions, reserved, 0).is_admitted:
                its = Taken(model.now, reserved)
                running[f"{number}"] = (its, reserved)
                taken.append(its)
        model.now += draw.choice((0, 1_000, 500_000, draw.randrange(30_000_000)))
    for start, first in enumerate(taken):
        total = 0
        for last in taken[start:]:
            total += last.tokens
            allowed = limit + (last.at_us - first.at_us) * limit / MINUTE_US
            assert total <= allowed * 1.0001 + 0.02, f"seed {seed}: {total} of {allowed}"


def test_what_is_given_back_never_lets_in_more_than_the_limit():
    for seed in range(300):
        run_refunding_model(seed)


def test_a_command_that_comes_late_does_not_fill_an_account_twice(client):
    """Also where the clock of a Redis that has taken over is behind."""
    world = ScriptedWorld(client, {"tokens_per_minute": 100})
    dimensions = world.dimensions()
    assert world.reserve("a", dimensions, 100, 0).is_admitted
    world.advance(-90_000_000)
    refused = world.reserve("b", dimensions, 1, 0)
    assert not refused.is_admitted
    assert refused.wait_us >= 90_000_000


def test_what_could_never_pass_is_told_so(client):
    world = ScriptedWorld(client, {"tokens_per_minute": 100, "requests_per_minute": 1})
    dimensions = world.dimensions()
    assert world.reserve("a", dimensions, 1, 0).is_admitted
    assert world.reserve("b", dimensions, 101, 0).wait_us == -1  # rather than the wait for the other limit


def test_a_days_tokens_come_back_at_midnight_and_not_for_what_was_reserved_before(client):
    world = ScriptedWorld(client, {"tokens_per_day": 1000})
    dimensions = world.dimensions()
    assert world.reserve("a", dimensions, 1000, 0).is_admitted
    refused = world.reserve("b", dimensions, 1, 0)
    assert refused.wait_us == DAY_US // 2
    world.renew("a", dimensions, 0)
    world.set_clock(START_US + DAY_US // 2)
    world.model.leases["a"] = START_US  # it is late, and has run out
    client.zadd(world.keys.limit_state(world.tenant)[2], {"a": START_US})
    assert world.reserve("b", dimensions, 1000, 0).is_admitted
    assert not world.reserve("c", dimensions, 1, 0).is_admitted


def test_a_reservation_that_was_settled_before_it_was_made_is_not_made(client):
    world = ScriptedWorld(client, {"max_concurrency": 1, "tokens_per_minute": 100})
    dimensions = world.dimensions()
    world.settle("a", dimensions, (0, 0), is_unsure=True)
    argument = msgspec.msgpack.encode((LEASE_US, dimensions.packed, [("a", 50, 0)]))
    [(status, *_)] = msgspec.msgpack.decode(world._run("reserve", dimensions, argument))
    assert status == 2
    world.renew("a", dimensions, 10)
    assert world.reserve("b", dimensions, 100, 0).is_admitted  # neither the slot nor the tokens are taken


def test_a_command_that_is_sent_twice_charges_once(client):
    world = ScriptedWorld(client, {"max_concurrency": 2, "tokens_per_minute": 100})
    dimensions = world.dimensions()
    assert world.reserve("a", dimensions, 50, 0).is_admitted
    argument = msgspec.msgpack.encode((LEASE_US, dimensions.packed, [("a", 50, 0)]))
    [(status, *_)] = msgspec.msgpack.decode(world._run("reserve", dimensions, argument))
    assert status == 1
    assert world.reserve("b", dimensions, 50, 0).is_admitted


def test_a_lease_that_has_run_out_is_settled_with_what_was_last_reported(client):
    world = ScriptedWorld(client, {"max_concurrency": 1, "tokens_per_day": 1000})
    dimensions = world.dimensions()
    assert world.reserve("a", dimensions, 100, 500).is_admitted
    world.renew("a", dimensions, 40)
    assert not world.reserve("b", dimensions, 100, 0).is_admitted  # the slot
    world.advance(LEASE_US)
    assert world.reserve("b", dimensions, 100, 760).is_admitted  # 1000 less 140
    world.check()


def test_a_running_request_that_redis_has_lost_is_put_back(client):
    world = ScriptedWorld(client, {"max_concurrency": 1, "tokens_per_minute": 100})
    dimensions = world.dimensions()
    world.renew("a", dimensions, 30)  # nothing of it is known
    assert not world.reserve("b", dimensions, 1, 0).is_admitted
    world.settle("a", dimensions, (20, 60))
    refused = world.reserve("b", dimensions, 21, 0)
    assert refused.refusing is not None
    assert refused.refusing.name == "tokens_per_minute"  # 80 are charged now
    assert world.reserve("c", dimensions, 20, 0).is_admitted


def test_shadow_limits_refuse_nobody_and_charge_nobody_whom_they_would_have_refused(client):
    world = ScriptedWorld(client, {"tokens_per_minute": 100, "shadow": ["tokens_per_minute"]})
    dimensions = world.dimensions()
    assert world.reserve("a", dimensions, 80, 0).shadows == []
    told = world.reserve("b", dimensions, 50, 0)
    assert told.is_admitted
    assert [each.name for each in told.shadows] == ["tokens_per_minute"]
    assert world.reserve("c", dimensions, 20, 0).shadows == []


def test_accounts_that_have_run_off_are_forgotten(client):
    world = ScriptedWorld(client, {"tokens_per_minute": 100, "tokens_per_day": 1000})
    dimensions = world.dimensions()
    world.reserve("a", dimensions, 10, 0)
    world.settle("a", dimensions, (10, 0))
    world.advance(DAY_US)
    world._run("sweep", dimensions, 256, "0")
    assert client.hgetall(world.keys.limit_state(world.tenant)[0]) == {}


async def test_a_full_redis_still_reserves_and_settles(tmp_path):
    """Whatever has filled it."""
    with running_valkey(tmp_path) as url, connect(url, 2000) as own:
        tenant = TenantConfig(name="t", requests_per_minute=10, tokens_per_minute=100)
        dimensions = dimensions_of(tenant, "r", "k", None, RedisKeys("n"), "fail_open")
        reserve = msgspec.msgpack.encode((LEASE_US, dimensions.packed, [("a", 90, 0), ("b", 90, 0)]))
        settle = msgspec.msgpack.encode((LEASE_US, [("a", 0, 0, 0)]))
        client = connect_async(url, 2000)
        lane = Lane(client, Pulse(2.0))
        own.config_set("maxmemory", 1)
        with pytest.raises(redis.OutOfMemoryError):
            own.set("anything", "else")
        replies = await lane.send(
            [
                Call(Script("reserve.lua"), dimensions.redis_keys, (reserve,)),
                Call(Script("settle.lua"), dimensions.redis_keys, (settle,)),
                Call(Script("reserve.lua"), dimensions.redis_keys, (reserve,)),
            ]
        )
        first, num_settled, second = replies
        assert [status for status, *_ in msgspec.msgpack.decode(first)] == [1, 0]
        assert num_settled == 1
        assert [status for status, *_ in msgspec.msgpack.decode(second)] == [1, 0]
        await lane.close()
        await client.aclose()


def test_the_key_of_a_limit_is_that_of_its_tenant_and_lies_in_one_slot_of_a_cluster(client):
    limits = Limits(max_concurrency=1)
    tenant = TenantConfig(name="acme", max_concurrency=2, route_limits={"chat": limits}, key_limits=limits)
    dimensions = dimensions_of(tenant, "chat", "key_1", None, RedisKeys("n"), "fail_open")
    assert len(dimensions.redis_keys) == 6
    assert all("{acme}" in key for key in dimensions.redis_keys)
    assert isinstance(dimensions.all[0], Dimension)
