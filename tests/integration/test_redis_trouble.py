"""Limits while Redis is paused, gone, slow, empty, full or failed over: what is written in the README."""

from __future__ import annotations

import asyncio
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compose.valkey import EmbeddedValkey, free_port
from shared.identifiers import TenantId
from shared.redis_client import connect
from tests.burst import BurstAnswer, burst, completion
from tests.http_client import send
from tests.stack import Stack, fake_model
from tests.tcp_proxy import TcpProxy

TIMEOUT_S = 0.2  # more than by default: the machine of the tests may have much else to do
RECOVERY_S = 5.0
DOCUMENT: dict[str, Any] = {
    "redis": {"timeout_ms": round(TIMEOUT_S * 1e3)},
    "gateway": {"reservation_lease_s": 20.0},
    "models": [fake_model("fake", "step_delay_ms=5")],
    "tenants": [
        {"name": "open", "requests_per_minute": 1, "max_concurrency": 50, "on_redis_failure": "fail_open"},
        {"name": "closed", "requests_per_minute": 10_000, "on_redis_failure": "fail_closed"},
        *(
            {"name": f"share-{trouble}", "requests_per_minute": 40, "on_redis_failure": "local_share"}
            for trouble in ("paused", "stopped", "slow")
        ),
        {
            "name": "mixed",
            "requests_per_minute": 1,
            "max_concurrency": 4,
            "on_redis_failure": {"requests_per_minute": "fail_open", "max_concurrency": "local_share"},
        },
        {"name": "slots", "max_concurrency": 2},
    ],
}


class Server:
    """A Valkey of one's own."""

    def __init__(self, directory: Path) -> None:
        self._valkey = EmbeddedValkey(directory, free_port(), "secret")
        self._valkey.write_configuration()
        self.process = subprocess.Popen(self._valkey.command, stdin=subprocess.DEVNULL)
        assert self._valkey.wait_until_it_answers(lambda: self.process.poll() is None)
        self.client = connect(self.url, 5000)

    @property
    def url(self) -> str:
        return self._valkey.url

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._valkey.port

    def close(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("valkey"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[TcpProxy]:
    with TcpProxy(server.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def whole_stack(server: Server, proxy: TcpProxy) -> Iterator[Stack]:
    with Stack(server.url, DOCUMENT, {"HEADRACE_REDIS_URL": proxy.url}) as stack:
        stack.start_gateway("second")
        stack.wait_ready()
        yield stack


class World:
    """A stack whose Redis is well when a test begins, with keys that its gateways know."""

    def __init__(self, stack: Stack, server: Server, proxy: TcpProxy) -> None:
        self.stack = stack
        self.server = server
        self.proxy = proxy
        self.keys = {tenant.name: stack.key(tenant.name) for tenant in stack.config.tenants}
        self._log_lengths = {name: len(stack.log(name)) for name in ("gateway", "second")}

    async def ask(self, tenant: str, number: int = 1, **fields: Any) -> list[BurstAnswer]:
        return await burst(self.stack.urls, self.keys[tenant], [completion(**fields)] * number)

    async def statuses(self, tenant: str, number: int = 1, **fields: Any) -> Counter[int]:
        return Counter(answer.status for answer in await self.ask(tenant, number, **fields))

    def log_lines(self, name: str = "gateway") -> list[str]:
        return self.stack.log(name)[self._log_lengths[name] :].splitlines()

    def warnings(self, name: str = "gateway") -> list[str]:
        return [line for line in self.log_lines(name) if re.search("WARNING|ERROR|CRITICAL", line)]

    def is_known_to_be_away(self) -> bool:
        """By both gateways."""
        return self._all_tell('headrace_redis_available{purpose="limits"} 0.0')

    def know_each_other(self) -> bool:
        return self._all_tell("headrace_live_gateways 2.0")

    def _all_tell(self, figure: str) -> bool:
        return all(figure in send(url, "GET", "/metrics").data.decode() for url in self.stack.urls)

    def num_slots(self, tenant: str) -> int:
        return self.stack.redis.zcard(self.stack.keys.concurrency_slots(TenantId(tenant)))

    async def until(self, condition: Callable[[], Awaitable[bool]], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not await condition():
            assert time.monotonic() < deadline, f"{what} within {timeout_s} s"
            await asyncio.sleep(0.05)

    async def knows_all_keys(self) -> bool:
        """Both gateways do."""
        answers = [answer for tenant in self.keys for answer in await self.ask(tenant, 2)]
        return all(answer.status in (200, 429) for answer in answers)

    async def is_exact(self) -> bool:
        """Both gateways refuse what is over a limit of one request a minute, and say where it stands."""
        answers = await self.ask("open", 2)
        return all(answer.status == 429 for answer in answers) and all(
            "x-ratelimit-remaining-requests" in answer.headers for answer in answers
        )


@pytest.fixture
async def world(whole_stack: Stack, server: Server, proxy: TcpProxy) -> World:
    world = World(whole_stack, server, proxy)
    await world.until(world.knows_all_keys, 15, "known keys")
    await world.until(lambda: _is(world.know_each_other()), 15, "two gateways")
    await world.until(world.is_exact, 15, "a Redis that is well")
    return world


async def stream(world: World, tenant: str) -> BurstAnswer:
    """One that runs for two seconds."""
    [answer] = await burst(
        world.stack.urls[:1], world.keys[tenant], [completion(max_tokens=400, stream=True, ignore_eos=True)]
    )
    return answer


def paused(world: World) -> tuple[Callable[[], None], Callable[[], None]]:
    return (
        lambda: world.server.process.send_signal(signal.SIGSTOP),
        lambda: world.server.process.send_signal(signal.SIGCONT),
    )


def stopped(world: World) -> tuple[Callable[[], None], Callable[[], None]]:
    return world.proxy.stop, world.proxy.resume


def slow(world: World) -> tuple[Callable[[], None], Callable[[], None]]:
    def set_delay(delay_s: float) -> None:
        world.proxy.delay_s = delay_s

    return lambda: set_delay(1.0), lambda: set_delay(0.0)


@pytest.mark.parametrize("trouble", [paused, stopped, slow])
async def test_each_limit_does_as_its_mode_says_and_is_exact_again_within_seconds(world, trouble):
    begin, end = trouble(world)
    healthy = statistics.median(answer.took_s for answer in await world.ask("closed", 4))
    running = asyncio.create_task(stream(world, "slots"))
    await world.until(lambda: _is(world.num_slots("slots") == 1), 15, "a stream")
    begin()
    try:
        first = await world.ask("open", 8)
        await world.until(lambda: _is(world.is_known_to_be_away()), 15, "the breaker")
        assert {answer.status for answer in first} == {200}  # fail open
        assert await world.statuses("closed", 8) == {503: 8}
        shares = await world.statuses(f"share-{trouble.__name__}", 60)
        # Two gateways with half of it each, but for what they had let in by it before; some has come back.
        assert 30 <= shares[200] <= 43, shares
        assert shares[200] + shares[429] == 60
        mixed = await world.statuses("mixed", 8, max_tokens=100)
        assert mixed == {200: 4, 429: 4}  # two slots for each gateway; the rate is open
        later = await world.ask("open", 10)
        assert {answer.status for answer in later} == {200}
        slowest = max(answer.took_s for answer in [*first, *later])
        print(f"healthy {healthy * 1e3:.0f} ms, slowest {slowest * 1e3:.0f} ms")
        assert slowest < healthy + 2 * TIMEOUT_S + 0.3  # keys and limits; the rest is this machine's
        streamed = await running
    finally:
        end()
    assert streamed.status == 200
    assert streamed.data.endswith(b"data: [DONE]\n\n")
    await world.until(world.is_exact, RECOVERY_S, "exact again")
    for name in ("gateway", "second"):
        lines = world.warnings(name)
        assert len(lines) <= 10, lines
        assert len([line for line in lines if "unavailable for limits" in line]) <= 1, lines
    await world.until(lambda: _is(world.num_slots("slots") == 0), RECOVERY_S, "the slot of the stream")


async def _is(value: bool) -> bool:
    return value


def test_the_log_says_what_is_wrong_once_for_each_kind_of_call(whole_stack):
    """After all the trouble above."""
    warnings = [line for line in whole_stack.log("gateway").splitlines() if "Redis is unavailable" in line]
    assert warnings
    assert all(re.search("silent|cannot be reached|answers with an error", line) for line in warnings)


async def test_a_flushed_redis_knows_running_requests_again_within_seconds(world):
    running = [asyncio.create_task(stream(world, "slots")) for _ in range(2)]
    await world.until(lambda: _is(world.num_slots("slots") == 2), 15, "two streams")
    limits = world.stack.redis.keys(f"{world.stack.config.redis.namespace}:limit:*")
    world.stack.redis.delete(*limits)  # as FLUSHALL does, but keys and engines are another test's matter
    began = time.monotonic()
    await world.until(lambda: _is(world.num_slots("slots") == 2), RECOVERY_S, "their slots")
    print(f"after {time.monotonic() - began:.2f} s")
    if not any(task.done() for task in running):
        assert await world.statuses("slots") == {429: 1}
    assert {(await task).status for task in running} == {200}
    await world.until(lambda: _is(world.num_slots("slots") == 0), 15, "free slots")


async def test_connections_that_the_server_has_closed_switch_no_limit_off(world):
    world.server.client.client_kill_filter(_type="normal", skipme=True)
    assert await world.is_exact()


async def test_a_full_redis_still_limits(world):
    world.server.client.config_set("maxmemory", 1)
    try:
        for _ in range(3):
            assert await world.is_exact()
        assert await world.statuses("closed", 4) == {200: 4}
        assert not world.is_known_to_be_away()
    finally:
        world.server.client.config_set("maxmemory", 0)


async def test_what_began_while_redis_was_away_holds_its_slot_after_that(world):
    world.proxy.stop()
    try:
        await world.until(lambda: _is(world.is_known_to_be_away()), 15, "the breaker")
        running = [asyncio.create_task(stream(world, "slots")) for _ in range(2)]
        await asyncio.sleep(0.3)
    finally:
        world.proxy.resume()
    await world.until(lambda: _is(world.num_slots("slots") == 2), RECOVERY_S, "their slots")
    assert {(await task).status for task in running} == {200}
    await world.until(lambda: _is(world.num_slots("slots") == 0), 15, "free slots")


async def test_after_a_failover_the_new_server_is_asked_though_the_old_one_still_answers(world, tmp_path):
    """The old one has become a replica, which answers that it is read-only."""
    replica = Server(tmp_path / "replica")
    try:
        primary = world.server.client
        primary.config_set("repl-diskless-sync-delay", 0)
        replica.client.config_set("masterauth", "secret")
        replica.client.replicaof(*world.server.address)
        await world.until(
            lambda: _is(replica.client.info("replication").get("master_link_status") == "up"), 15, "a replica"
        )
        await world.until(world.is_exact, 15, "exactness before it")
        replica.client.replicaof("NO", "ONE")
        world.proxy.target = replica.address
        primary.config_set("masterauth", "secret")
        primary.replicaof(*replica.address)
        await world.until(world.is_exact, RECOVERY_S, "exact again")
        accounts, *_ = world.stack.keys.limit_state(TenantId("open"))
        assert replica.client.hlen(accounts) > 0
    finally:
        world.proxy.stop()
        world.server.client.replicaof("NO", "ONE")
        world.proxy.target = world.server.address
        world.proxy.resume()
        replica.close()
