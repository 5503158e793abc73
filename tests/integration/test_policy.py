"""Tenants, limits, routes and placement, through the HTTP surface and a real Redis."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from shared.config import RouteConfig, VariantConfig
from shared.redis_schema import PolicyRecord, from_json, to_json
from tests.http_client import Answer, send
from tests.stack import Stack, fake_model, wait_until

DOCUMENT: dict[str, Any] = {
    "redis": {"timeout_ms": 10_000},  # what is looked at is what Redis says, also where much else is to do
    "models": [fake_model("a", "step_delay_ms=2", engines=2), fake_model("b", engines=1)],
    "tenants": [
        {"name": "free"},
        {"name": "metered", "requests_per_minute": 20, "burst": 20},
        {"name": "metered-too", "requests_per_minute": 60, "burst": 1},
        {"name": "narrow", "max_concurrency": 3},
    ],
    "routes": [
        {
            "name": "chat",
            "sticky": "user",
            "split": [
                {"variant": "control", "model": "a", "weight": 90},
                {"variant": "treated", "model": "b", "weight": 10},
            ],
        }
    ],
}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, dict(DOCUMENT)) as stack:
        yield stack


async def post_all(
    url: str, key: str, bodies: list[dict[str, Any]], *, path: str = "/v1/completions"
) -> list[tuple[int, dict[str, str]]]:
    """All at one instant; statuses and headers (names in lower case) in the order of the bodies."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url, headers=headers, connector=connector) as session:

        async def post(body: dict[str, Any]) -> tuple[int, dict[str, str]]:
            async with session.post(path, json=body) as response:
                await response.read()
                return response.status, {name.lower(): value for name, value in response.headers.items()}

        return await asyncio.gather(*(post(body) for body in bodies))


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "b", "prompt": "hello", "max_tokens": 1, **fields}


async def test_of_100_requests_at_one_instant_exactly_the_burst_of_20_passes(stack):
    answers = await post_all(stack.url, stack.key("metered"), [completion()] * 100)
    assert Counter(status for status, _ in answers) == {200: 20, 429: 80}
    refused = [headers for status, headers in answers if status == 429]
    assert all(1 <= int(headers["retry-after"]) <= 3 for headers in refused)
    remaining = [
        int(headers["x-ratelimit-remaining-requests"]) for status, headers in answers if status == 200
    ]
    assert sorted(remaining) == list(range(20))


def test_a_client_that_obeys_retry_after_passes_at_once(stack):
    key = stack.key("metered-too")

    def post() -> Answer:
        return send(stack.url, "POST", "/v1/completions", completion(), key=key)

    assert post().status == 200
    refused = post()
    assert refused.status == 429
    assert refused.error["code"] == "rate_limit_exceeded"
    time.sleep(int(refused.headers["retry-after"]))
    assert post().status == 200


async def test_concurrency_slots_are_taken_and_given_back(stack):
    key = stack.key("narrow")
    slow = completion(model="a", max_tokens=200)
    answers = await post_all(stack.url, key, [slow] * 10)
    assert Counter(status for status, _ in answers) == {200: 3, 429: 7}
    slots = stack.keys.concurrency_slots("narrow")
    wait_until(lambda: stack.redis.zcard(slots) == 0, 2, "all slots back")
    answers = await post_all(stack.url, key, [slow] * 3)
    assert Counter(status for status, _ in answers) == {200: 3}


async def test_slots_do_not_leak_however_a_request_ends(stack):
    key = stack.key("narrow")
    slots = stack.keys.concurrency_slots("narrow")
    for number in range(30):
        await post_all(stack.url, key, [completion(model="a", prompt="x" * 5000)] * 3)  # refused: too long
        try:
            async with asyncio.timeout(0.01 * (number % 4)):  # leaves
                await post_all(stack.url, key, [completion(model="a", max_tokens=500)] * 3)
        except TimeoutError:
            pass
    await asyncio.to_thread(wait_until, lambda: stack.redis.zcard(slots) == 0, 2, "all slots back")
    answers = await post_all(stack.url, key, [completion()] * 3)
    assert Counter(status for status, _ in answers) == {200: 3}


def test_a_gateway_that_dies_gives_its_slots_back_when_they_expire(stack):
    """The script drops slots whose time has come; here one is put there with a time long past."""
    slots = stack.keys.concurrency_slots("narrow")
    stack.redis.zadd(slots, {f"of a dead gateway {number}": 1 for number in range(3)})
    answer = send(stack.url, "POST", "/v1/completions", completion(), key=stack.key("narrow"))
    assert answer.status == 200


async def test_a_route_splits_users_by_weight_and_keeps_them(stack):
    key = stack.key("free")

    async def variants() -> list[str]:
        bodies = [completion(model="chat", user=f"user {number}") for number in range(200)]
        answers = await post_all(stack.url, key, bodies)
        assert all(status == 200 for status, _ in answers)
        return [headers["x-headrace-variant"] for _, headers in answers]

    first, second = await variants(), await variants()
    assert first == second
    assert 5 <= first.count("treated") <= 40  # 20 expected; 3 sigma is 13. The law itself is a unit test


async def test_conversations_stay_on_one_engine_and_spread_over_both(stack):
    key = stack.key("free")
    engines: dict[int, list[str]] = {number: [] for number in range(20)}
    conversations = {
        number: [{"role": "user", "content": f"Conversation {number}: tell me about it, please."}]
        for number in engines
    }
    for _ in range(4):
        bodies = [
            {"model": "a", "messages": messages, "max_tokens": 16} for messages in conversations.values()
        ]
        answers = await post_all(stack.url, key, bodies, path="/v1/chat/completions")
        for number, (status, headers) in enumerate(answers):
            assert status == 200
            engines[number].append(headers["x-headrace-engine"])
            conversations[number] += [
                {"role": "assistant", "content": "Certainly. " * 10},
                {"role": "user", "content": "And then?"},
            ]
    stayed = sum(turns.count(turns[0]) for turns in engines.values())
    shares = Counter(engine for turns in engines.values() for engine in turns)
    print(f"{stayed} of 80 turns stayed; shares {dict(shares)}")
    assert stayed >= 0.9 * 80
    assert max(shares.values()) <= 0.6 * 80


def test_a_newer_policy_in_redis_is_in_force_within_seconds(stack):
    stored = from_json(PolicyRecord, stack.redis.get(stack.keys.policy))
    routes = [*stored.routes, stored.routes[0].model_copy(update={"name": "fresh"})]
    newer = PolicyRecord(stored.version + 1, stored.source_hash, stored.tenants, routes)
    stack.redis.set(stack.keys.policy, to_json(newer))
    key = stack.key("free")

    def status() -> int:
        return send(stack.url, "POST", "/v1/completions", completion(model="fresh"), key=key).status

    wait_until(lambda: status() == 200, 5, "the new route")
    stack.redis.set(stack.keys.policy, b'{"version": "broken')
    time.sleep(1.2)
    assert status() == 200  # what cannot be read does not replace what works


def test_a_second_gateway_shares_limits_and_engines(stack):
    first = stack.url
    second = stack.start_gateway("second")
    stack.wait_ready()
    key = stack.key("metered-too")
    time.sleep(1.1)  # the bucket of an earlier test is full again
    statuses = [send(url, "POST", "/v1/completions", completion(), key=key).status for url in (first, second)]
    assert sorted(statuses) == [200, 429]


async def test_a_frozen_redis_delays_requests_by_no_more_than_its_timeout(own_redis):
    redis_url, redis_process = own_redis
    document = {
        "redis": {"timeout_ms": 200},
        "models": [fake_model("a", "step_delay_ms=5")],
        "tenants": [{"name": "t", "max_concurrency": 10}],
    }
    with Stack(redis_url, document) as stack:
        key = stack.key()
        slow = completion(model="a", max_tokens=300)
        stream = asyncio.create_task(post_all(stack.url, key, [slow]))
        await asyncio.to_thread(wait_until, lambda: stack.gauges()["running"] == 1, 5, "a stream")
        redis_process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        statuses = await post_all(stack.url, key, [completion(model="a")] * 5)
        assert [status for status, _ in statuses] == [200] * 5  # a known key, and limits fail open
        assert time.monotonic() - began < 3
        assert (await stream)[0][0] == 200  # what ran was not touched
        unknown = await post_all(stack.url, "hr-unknown", [completion(model="a")])
        assert unknown[0][0] == 503  # nobody is let in unchecked
        redis_process.send_signal(signal.SIGCONT)

        def status_of_unknown_key() -> int:
            return send(stack.url, "POST", "/v1/completions", completion(model="a"), key="hr-x").status

        await asyncio.to_thread(wait_until, lambda: status_of_unknown_key() == 401, 5, "recovery")
        log = stack.log("gateway")
        assert log.count("Redis is unavailable for limits") == 1
        assert log.count("Redis is unavailable") <= 3  # for keys, and for all else


async def test_slots_taken_while_redis_was_frozen_are_given_back_after_it(own_redis):
    redis_url, redis_process = own_redis
    document = {
        "redis": {"timeout_ms": 100},
        "models": [fake_model("a", "step_delay_ms=1")],
        "tenants": [{"name": "t", "max_concurrency": 5}],
    }
    with Stack(redis_url, document) as stack:
        key = stack.key()
        await post_all(stack.url, key, [completion(model="a")] * 5)  # connections are open now
        redis_process.send_signal(signal.SIGSTOP)
        frozen = asyncio.create_task(post_all(stack.url, key, [completion(model="a", max_tokens=50)] * 5))
        await asyncio.sleep(1.0)
        redis_process.send_signal(signal.SIGCONT)
        assert {status for status, _ in await frozen} == {200}
        slots = stack.keys.concurrency_slots("t")
        await asyncio.to_thread(wait_until, lambda: stack.redis.zcard(slots) == 0, 5, "all slots back")


def test_a_flushed_redis_gets_the_policy_again_and_all_gateways_agree(own_redis):
    redis_url, _ = own_redis
    with Stack(redis_url) as stack:
        assert stack.admin_status()["policy_version"] == 1
        stack.redis.flushall()
        stored = from_json(PolicyRecord, wait_until(lambda: stack.redis.get(stack.keys.policy), 5, "it"))
        routes = [RouteConfig(name="fresh", split=[VariantConfig(variant="v", model="fake")])]
        # The same number as before, since a Redis that was flushed has forgotten it.
        newer = PolicyRecord(stored.version, "another source", stored.tenants, routes)
        stack.redis.set(stack.keys.policy, to_json(newer))
        wait_until(lambda: "fresh" in stack.admin_status()["routes"], 5, "the new route")
