"""Who is let in: keys as a gateway knows them, over a real Valkey."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from compose.valkey import free_port
from gateway.auth.authenticator import Authenticator
from gateway.auth.caller import Caller
from gateway.auth.failure_throttle import MAX_ADDRESSES, FailureThrottle
from gateway.auth.known_keys import LIFETIME_S, STALE_LIFETIME_S, KnownKeys, RedisAccess
from gateway.breaker import OPEN_FOR_S, RedisBreaker
from gateway.errors import ApiError
from shared.api_keys import ApiKeyStore
from shared.config import GatewayConfig
from shared.identifiers import TenantId
from shared.networks import parse_address
from shared.redis_client import connect, connect_async
from shared.redis_schema import RedisKeys
from tests.valkey_server import start_valkey

PEPPER = b"pepper"
HOME = "192.0.2.7"


@dataclass
class World:
    """One gateway's authenticator; its clocks stand still unless they are moved."""

    redis_url: str
    options: GatewayConfig = field(default_factory=GatewayConfig)
    now: float = 1000.0
    wall: float = field(default_factory=time.time)
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        names = RedisKeys(f"auth-{uuid.uuid4().hex[:8]}")
        self.names = names
        self.sync = connect(self.redis_url, 2000)
        self.store = ApiKeyStore(self.sync, names, PEPPER)
        self.client = connect_async(self.redis_url, 500)
        access = RedisAccess(self.client, RedisBreaker(lambda: self.now))
        self.known = KnownKeys(names, access, access, lambda: self.now)
        self.authenticator = Authenticator(
            self.known,
            PEPPER,
            lambda: self.options,
            lambda reason: self.reasons.update([reason]),
            wall_clock=lambda: self.wall,
        )

    def create(self, **fields: Any) -> str:
        return self.store.create(TenantId("acme"), **fields).secret

    def id_of(self, secret: str) -> str:
        record = self.store.of_secret(secret)
        assert record is not None
        return record.key_id

    async def ask(self, secret: str, peer: str = HOME, **headers: str) -> Caller:
        sent = CIMultiDict({"Authorization": f"Bearer {secret}", **headers})
        return await self.authenticator.authenticate(CIMultiDictProxy(sent), peer)

    async def refusal(self, secret: str, peer: str = HOME, **headers: str) -> tuple[int, str]:
        with pytest.raises(ApiError) as caught:
            await self.ask(secret, peer, **headers)
        return caught.value.status, caught.value.message


@pytest.fixture
async def make_world(redis_url: str) -> AsyncIterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(url: str = redis_url, **options: Any) -> World:
        worlds.append(World(url, GatewayConfig(**options)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.sync.close()
        await world.client.aclose()


@pytest.fixture
async def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    server, process = start_valkey(tmp_path)
    yield server.url, process
    process.kill()
    process.wait(10)


NO_SUCH_KEY = (401, "Incorrect API key provided.")


async def test_a_key_stands_for_its_tenant_models_and_limits(world: World) -> None:
    secret = world.create(models=["chat"])
    caller = await world.ask(secret)
    assert (caller.tenant, caller.key_id, caller.limits) == ("acme", world.id_of(secret), None)
    assert caller.may_use("chat")
    with pytest.raises(ApiError) as caught:
        caller.check_may_use("other")
    assert (caught.value.status, caught.value.param) == (403, "model")
    by_x_api_key = CIMultiDictProxy(CIMultiDict({"x-api-key": secret}))
    assert await world.authenticator.authenticate(by_x_api_key, HOME) is caller


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "missing"),
        ({"x-api-key": " "}, "missing"),
        ({"Authorization": "Bearer "}, "malformed"),
        ({"Authorization": "Basic x"}, "malformed"),
        ({"Authorization": "Bearer \udcff"}, "unknown"),
    ],
)
async def test_whoever_has_no_key_is_told_so(world: World, headers: dict[str, str], reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        await world.authenticator.authenticate(CIMultiDictProxy(CIMultiDict(headers)), HOME)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert world.reasons == {reason: 1}


async def test_revocation_is_seen_at_the_next_look_and_told_like_a_key_that_never_was(world: World) -> None:
    secret, other = world.create(), world.create()
    await world.ask(secret)
    await world.known.refresh()
    world.store.revoke(world.id_of(secret))
    await world.ask(secret)  # nobody has looked yet
    await world.known.refresh()
    assert await world.refusal(secret) == await world.refusal("hr-never-was") == NO_SUCH_KEY
    assert world.reasons == {"revoked": 1, "unknown": 1}
    await world.ask(other)


async def test_revocation_is_seen_after_the_lifetime_even_if_nobody_looks(world: World) -> None:
    secret = world.create()
    await world.ask(secret)
    world.store.revoke(world.id_of(secret))
    world.now += LIFETIME_S - 0.01
    await world.ask(secret)
    world.now += 0.02
    assert await world.refusal(secret) == NO_SUCH_KEY


async def test_an_answer_that_was_on_its_way_for_long_does_not_bring_a_revoked_key_back(world: World) -> None:
    secret = world.create()
    await world.ask(secret)
    arrived, go_on = asyncio.Event(), asyncio.Event()
    prompt = world.known._prompt
    real = prompt.client

    class Slow:
        """Passes everything on, and holds the answer to the first `hget` back."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        async def hget(self, *arguments: Any) -> Any:
            value = await real.hget(*arguments)
            if not arrived.is_set():
                arrived.set()
                await go_on.wait()
            return value

    world.now += LIFETIME_S
    world.known._prompt = RedisAccess(Slow(), prompt.breaker)
    held = asyncio.create_task(world.ask(secret))
    await arrived.wait()  # it has read the valid key
    world.store.revoke(world.id_of(secret))
    world.now += 0.1
    await world.known.refresh()
    assert await world.refusal(secret) == NO_SUCH_KEY
    go_on.set()
    await asyncio.gather(held, return_exceptions=True)
    assert await world.refusal(secret) == NO_SUCH_KEY


async def test_both_secrets_work_during_the_overlap_and_the_old_one_ends_with_it(world: World) -> None:
    old = world.create()
    await world.ask(old)
    rotated = world.store.rotate(world.id_of(old), overlap_s=60.0)
    for _ in range(2):
        assert (await world.ask(old)).key_id == (await world.ask(rotated.secret)).key_id
        await world.known.refresh()
    world.wall += 61
    assert await world.refusal(old) == (401, "This API key has expired.")
    await world.ask(rotated.secret)


async def test_a_retired_secret_is_refused_at_the_next_look(world: World) -> None:
    old = world.create()
    await world.ask(old)
    await world.known.refresh()
    rotated = world.store.rotate(world.id_of(old), overlap_s=60.0)
    world.store.retire(rotated.record.key_id)
    await world.known.refresh()
    assert await world.refusal(old) == NO_SUCH_KEY
    await world.ask(rotated.secret)


async def test_a_key_works_from_its_first_moment_to_its_last(world: World) -> None:
    secret = world.create(not_before=world.wall + 10, not_after=world.wall + 20)
    assert await world.refusal(secret) == (401, "This API key is not valid yet.")
    world.wall += 10
    await world.ask(secret)
    world.wall += 10
    assert await world.refusal(secret) == (401, "This API key has expired.")
    assert world.reasons == {"not_yet_valid": 1, "expired": 1}


async def test_a_key_with_networks_works_only_from_them(make_world: Callable[..., World]) -> None:
    world = make_world(trusted_proxies=["10.0.0.0/8"])
    secret = world.create(cidrs=["192.0.2.0/24", "2001:db8::/32"])
    for peer in ("192.0.2.200", "2001:db8::1", "::ffff:192.0.2.1"):
        await world.ask(secret, peer)
    await world.ask(secret, "10.0.0.1", **{"X-Forwarded-For": "192.0.2.9"})
    refused = (403, "This API key may not be used from this address.")
    assert await world.refusal(secret, "203.0.113.1", **{"X-Forwarded-For": "192.0.2.9"}) == refused
    assert await world.refusal(secret, "10.0.0.1", **{"X-Forwarded-For": "nonsense"}) == refused
    assert await world.refusal(secret, "10.0.0.1") == refused
    assert await world.refusal(secret, "") == refused
    assert world.reasons == {"address": 4}


async def test_known_keys_go_on_without_redis_for_a_while_and_unknown_ones_do_not(
    make_world: Callable[..., World], own_redis: tuple[str, subprocess.Popen[bytes]]
) -> None:
    url, process = own_redis
    world = make_world(url)
    secret, unseen = world.create(), world.create()
    await world.ask(secret)
    process.kill()
    process.wait()
    world.now += STALE_LIFETIME_S - 1
    await world.known.refresh()
    await world.ask(secret)
    assert (await world.refusal(unseen))[0] == 503
    world.now += OPEN_FOR_S + 1
    assert (await world.refusal(secret))[0] == 503


async def test_only_keys_that_are_new_wait_for_a_slow_redis(world: World) -> None:
    """Here the prompt way does not lead anywhere, as if every answer came too late for it."""
    nowhere = connect_async(f"redis://127.0.0.1:{free_port()}", 50)
    world.known._prompt = RedisAccess(nowhere, RedisBreaker(lambda: world.now))
    secret = world.create()
    await world.ask(secret)
    world.now += LIFETIME_S
    await world.ask(secret)  # as it was
    world.store.revoke(world.id_of(secret))
    await world.known.refresh()
    assert await world.refusal(secret) == NO_SUCH_KEY
    await nowhere.aclose()


async def test_a_flushed_redis_knows_nobody(world: World) -> None:
    secret = world.create()
    await world.ask(secret)
    await world.known.refresh()
    world.sync.delete(world.names.api_keys, world.names.api_key_digests, world.names.api_keys_version)
    await world.known.refresh()
    assert await world.refusal(secret) == NO_SUCH_KEY


@pytest.mark.parametrize(
    "value", [b"\xff", b"{", b"[]", b'{"key_id": 1}', b'"x"', b'{"cidrs": ["10.0.0.1/8"]}']
)
async def test_what_cannot_be_read_is_logged_once_and_refused(
    world: World, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    secret = world.create()
    await world.ask(secret)
    if b"cidrs" in value:  # a good record but for that
        stored = msgspec.json.decode(world.sync.hget(world.names.api_keys, world.id_of(secret)))
        value = msgspec.json.encode({**stored, **msgspec.json.decode(value)})
    world.sync.hset(world.names.api_keys, world.id_of(secret), value)
    world.now += LIFETIME_S
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert (await world.refusal(secret))[0] == 503
            world.now += LIFETIME_S
    assert len(caplog.records) == 1


async def test_guessing_is_throttled_by_address_without_harm_to_keys_that_are_known(
    make_world: Callable[..., World],
) -> None:
    world = make_world(max_failed_auth_per_minute=5)
    secret, unseen = world.create(), world.create()
    await world.ask(secret)
    statuses = [(await world.refusal(f"hr-{number}"))[0] for number in range(8)]
    assert statuses == [401] * 5 + [429] * 3
    with pytest.raises(ApiError) as caught:
        await world.ask(unseen)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "12")
    await world.ask(secret)
    world.now += LIFETIME_S  # known, though to be looked up again
    await world.ask(secret)
    await world.ask(unseen, "192.0.2.8")
    assert world.reasons == {"unknown": 5, "throttled": 4}


async def test_one_wrong_key_that_is_sent_again_and_again_does_not_shut_its_address_out(
    make_world: Callable[..., World],
) -> None:
    world = make_world(max_failed_auth_per_minute=2)
    secret = world.create()
    for _ in range(20):
        assert await world.refusal("hr-wrong") == NO_SUCH_KEY
    await world.ask(secret)


async def test_options_that_change_are_taken_over(make_world: Callable[..., World]) -> None:
    world = make_world(max_failed_auth_per_minute=1)
    await world.refusal("hr-1")
    assert (await world.refusal("hr-2"))[0] == 429
    world.options = GatewayConfig(max_failed_auth_per_minute=0)
    following = asyncio.create_task(world.authenticator.follow())
    await asyncio.sleep(0)  # it has begun
    following.cancel()
    statuses = {(await world.refusal(f"hr-{number}"))[0] for number in range(100)}
    assert statuses == {401}


def test_the_throttle_lets_so_many_through_in_a_minute_and_counts_a_network_of_ipv6_as_one() -> None:
    now = 0.0
    throttle = FailureThrottle(60, lambda: now)
    one, other = parse_address("2001:db8::1"), parse_address("2001:db8::2")
    num_tried = 0
    while now < 120:
        if throttle.wait_s(one) == 0:
            throttle.failed(other if num_tried % 2 else one)
            num_tried += 1
        else:
            now += throttle.wait_s(one)
    assert num_tried == 60 + 119  # the burst, and then one each second
    assert throttle.wait_s(parse_address("2001:db8:0:1::1")) == 0
    assert throttle.wait_s(None) == 0


def test_the_throttle_remembers_a_bounded_number_of_addresses() -> None:
    throttle = FailureThrottle(1, lambda: 0.0)
    for number in range(MAX_ADDRESSES + 1):
        throttle.failed(parse_address(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"))
    assert throttle.wait_s(parse_address("10.0.0.0")) == 0
    assert throttle.wait_s(parse_address("10.0.0.1")) == 60


async def test_a_known_key_costs_microseconds(world: World) -> None:
    secret = world.create()
    await world.ask(secret)
    sent = CIMultiDictProxy(CIMultiDict({"Authorization": f"Bearer {secret}"}))
    times: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(500):
            await world.authenticator.authenticate(sent, HOME)
        times.append((time.perf_counter() - began) / 500)
    print(f"{min(times) * 1e6:.1f} µs")
    assert min(times) < 40e-6
