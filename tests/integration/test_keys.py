"""API keys on two gateways with one Redis: revoked and rotated under load, and what they are held to."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from shared.api_keys import ApiKeyStore
from shared.identifiers import TenantId
from tests.http_client import Answer, send
from tests.stack import PEPPER, Stack, fake_model, wait_until

DOCUMENT: dict[str, Any] = {
    "gateway": {"trusted_proxies": ["127.0.0.0/8"], "max_failed_auth_per_minute": 20},
    "models": [fake_model("a"), fake_model("b")],
    "tenants": [{"name": "acme"}],
}
BODY = {"model": "a", "prompt": "hello", "max_tokens": 1}
REVOKED_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, dict(DOCUMENT)) as stack:
        stack.start_gateway("second")
        stack.wait_ready()
        yield stack


@pytest.fixture
def store(stack: Stack) -> ApiKeyStore:
    return ApiKeyStore(stack.redis, stack.keys, PEPPER.encode())


def create(store: ApiKeyStore, **fields: Any) -> str:
    return store.create(TenantId("acme"), **fields).secret


def complete(stack: Stack, key: str, *, url: str | None = None, model: str = "a", **headers: str) -> Answer:
    return send(
        url or stack.url, "POST", "/v1/completions", {**BODY, "model": model}, key=key, headers=headers
    )


@dataclass
class Load:
    """Requests at an even rate, whether they are answered or not. Times are of time.monotonic."""

    secret: str
    answers: list[tuple[float, int, str]] = field(default_factory=list)  # began, status, URL

    def statuses(self, url: str, since: float) -> set[int]:
        return {status for began, status, of in self.answers if of == url and began >= since}


@asynccontextmanager
async def load_of(secret: str, urls: list[str], per_second: float) -> AsyncIterator[Load]:
    """On all URLs together. `Load.secret` may be changed meanwhile."""
    load = Load(secret)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(url: str) -> None:
            began = time.monotonic()
            headers = {"Authorization": f"Bearer {load.secret}"}
            async with session.post(url + "/v1/completions", json=BODY, headers=headers) as response:
                await response.read()
                load.answers.append((began, response.status, url))

        async def keep_asking() -> None:
            start, number = time.monotonic(), 0
            async with asyncio.TaskGroup() as requests:
                while True:
                    requests.create_task(ask(urls[number % len(urls)]))
                    number += 1
                    await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))

        asking = asyncio.create_task(keep_asking())
        try:
            yield load
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def until(condition: Callable[[], Any], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, 20, what)


async def test_no_request_that_begins_5_s_after_its_key_is_revoked_succeeds(stack, store) -> None:
    secret, read = store.create(TenantId("acme"))
    async with load_of(secret, stack.urls, per_second=200) as load:
        await until(lambda: len(load.answers) >= 100, "load")
        assert {status for _, status, _ in load.answers} == {200}
        await asyncio.to_thread(store.revoke, read.key_id)
        revoked_at = time.monotonic()

        def all_refuse() -> bool:
            since = time.monotonic() - 0.3
            return all(load.statuses(url, since) == {401} for url in stack.urls)

        await until(all_refuse, "revocation on both")
        # Somebody who has read the key before writes it back now.
        late = msgspec.structs.replace(read, name="late", version=read.version + 1)
        assert await asyncio.to_thread(store.write, late, read.version) == "revoked"
        await until(lambda: time.monotonic() > revoked_at + REVOKED_WITHIN_S + 1, "six seconds")
    succeeded = [began - revoked_at for began, status, _ in load.answers if status == 200]
    duration_s = load.answers[-1][0] - load.answers[0][0]
    rate = len(load.answers) / duration_s
    print(f"{rate:.0f} requests/s; the last success began {max(succeeded):.2f} s after")
    assert max(succeeded) < REVOKED_WITHIN_S
    for url in stack.urls:
        assert load.statuses(url, revoked_at + REVOKED_WITHIN_S) == {401}
    assert {status for _, status, _ in load.answers} == {200, 401}


async def test_rotation_with_an_overlap_costs_not_one_401(stack, store) -> None:
    secret, read = store.create(TenantId("acme"))
    async with load_of(secret, stack.urls, per_second=200) as load:

        async def more() -> None:
            enough = len(load.answers) + 100
            await until(lambda: len(load.answers) >= enough, "load")

        await more()
        for _ in range(3):
            made = await asyncio.to_thread(store.rotate, read.key_id, 60.0)
            await more()  # clients have not changed yet
            load.secret = made.secret
            await more()
            await asyncio.to_thread(store.retire, read.key_id)
            await more()
    assert len(load.answers) > 900
    assert {status for _, status, _ in load.answers} == {200}
    for url in stack.urls:
        wait_until(lambda url=url: complete(stack, secret, url=url).status == 401, 10, "the first one's end")


def test_a_body_that_came_slowly_does_not_outlive_its_key(stack, store) -> None:
    secret = create(store)
    body = json.dumps(BODY).encode()
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=20)
    began = time.monotonic()
    connection.putrequest("POST", "/v1/completions")
    for name, value in (
        ("Authorization", f"Bearer {secret}"),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
    ):
        connection.putheader(name, value)
    connection.endheaders(body[:10])
    assert complete(stack, secret).status == 200
    store.revoke(store.of_secret(secret).key_id)
    wait_until(
        lambda: complete(stack, secret).status == 401 and time.monotonic() > began + 1.1, 10, "revocation"
    )
    connection.send(body[10:])
    assert connection.getresponse().status == 401
    connection.close()


def test_a_key_is_held_to_its_models(stack, store) -> None:
    secret = create(store, models=["a"])
    assert complete(stack, secret).status == 200
    refused = complete(stack, secret, model="b")
    assert (refused.status, refused.error["code"], refused.error["param"]) == (
        403,
        "permission_denied",
        "model",
    )
    assert complete(stack, secret, model="none").status == 404
    listed = send(stack.url, "GET", "/v1/models", key=secret).json["data"]
    assert [model["id"] for model in listed] == ["a"]
    assert send(stack.url, "GET", "/v1/models/a", key=secret).status == 200
    assert send(stack.url, "GET", "/v1/models/b", key=secret).status == 403
    assert send(stack.url, "GET", "/v1/models/b", key=create(store)).status == 200


def test_a_key_is_held_to_its_addresses_also_behind_a_proxy(stack, store) -> None:
    secret = create(store, cidrs=["203.0.113.0/24"])

    def status(*forwarded: str) -> int:
        headers = {"X-Forwarded-For": ", ".join(forwarded)} if forwarded else {}
        answer = complete(stack, secret, **headers)
        if answer.status == 403:
            assert answer.error["code"] == "permission_denied"
        return answer.status

    assert status("203.0.113.9") == 200
    assert status("198.51.100.1", "203.0.113.9", "127.0.0.2") == 200
    assert status("203.0.113.9", "198.51.100.1") == 403
    assert status() == 403
    assert status(";;\t=\xff") == 403
    assert complete(stack, create(store), **{"X-Forwarded-For": ";;\t=\xff"}).status == 200


def test_a_key_works_in_its_time_only_and_says_which_end_was_passed(stack, store) -> None:
    now = time.time()
    early = complete(stack, create(store, not_before=now + 3600))
    assert (early.status, early.error["message"]) == (401, "This API key is not valid yet.")
    late = complete(stack, create(store, not_after=now - 1))
    assert (late.status, late.error["message"]) == (401, "This API key has expired.")
    assert late.error["code"] == "invalid_api_key"


def failures(stack: Stack, reason: str) -> float:
    text = stack.get("/metrics")[1].decode()
    found = re.search(rf'^headrace_auth_failures_total{{reason="{reason}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_whoever_guesses_is_slowed_down_and_nobody_else(stack, store) -> None:
    known, unseen = create(store), create(store)
    guesser = {"X-Forwarded-For": "203.0.113.66"}
    assert complete(stack, known, **guesser).status == 200
    before = failures(stack, "unknown"), failures(stack, "throttled")
    statuses = [complete(stack, f"hr-guess-{number}", **guesser).status for number in range(30)]
    assert statuses[:20] == [401] * 20
    assert 429 in statuses[20:]
    refused = complete(stack, unseen, **guesser)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 3
    assert complete(stack, known, **guesser).status == 200
    assert complete(stack, unseen, **{"X-Forwarded-For": "203.0.113.67"}).status == 200
    assert failures(stack, "unknown") - before[0] == statuses.count(401)
    assert failures(stack, "throttled") - before[1] == statuses.count(429) + 1


def test_a_key_that_cannot_be_read_is_no_fault_of_the_gateway(stack, store) -> None:
    secret, record = store.create(TenantId("acme"))
    stack.redis.hset(stack.keys.api_keys, record.key_id, b'{"key_id": broken')
    for _ in range(3):
        refused = complete(stack, secret)
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
    logs = "".join(stack.log(name) for name in stack.processes if name in ("gateway", "second"))
    assert logs.count(f"{record.key_id}' in Redis cannot be read") == 1
