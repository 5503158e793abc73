"""Limits over gateways whose clocks are wrong and whose commands come late."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.burst import BurstAnswer, burst, completion
from tests.stack import Stack, fake_model
from tests.tcp_proxy import TcpProxy

PER_MINUTE = 120
BURST = 10
DELAY_S = 3.0
DOCUMENT = {
    # Who is late is waited for: otherwise the failure modes would be at work.
    "redis": {"timeout_ms": 15_000},
    "models": [fake_model()],
    "tenants": [{"name": "t", "requests_per_minute": PER_MINUTE, "burst": BURST}],
}


def shifted_clock(directory: Path, by_s: float) -> dict[str, str]:
    """The environment of a process whose wall clock is wrong, in all that Python asks it for."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        "import time\n"
        "true_time, true_time_ns = time.time, time.time_ns\n"
        f"time.time = lambda: true_time() + {by_s}\n"
        f"time.time_ns = lambda: true_time_ns() + {int(by_s * 1e9)}\n"
    )
    return {"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(scope="module")
def proxy(redis_url: str) -> Iterator[TcpProxy]:
    with TcpProxy(redis_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def stack(redis_url: str, proxy: TcpProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three gateways: one that is right, one that is ahead, and one that is behind and late."""
    directory = tmp_path_factory.mktemp("clocks")
    with Stack(redis_url, dict(DOCUMENT)) as stack:
        stack.start_gateway("ahead", environment=shifted_clock(directory / "ahead", 90.0))
        behind = shifted_clock(directory / "behind", -90.0)
        stack.start_gateway("behind", environment={**behind, "HEADRACE_REDIS_URL": proxy.url})
        stack.wait_ready()
        yield stack


async def load(stack: Stack, key: str, for_s: float) -> tuple[list[BurstAnswer], float]:
    """Twice the limit, over all gateways; the answers, and how long it took until the last one was there."""
    began = time.monotonic()
    interval_s = len(stack.urls) * 60 / PER_MINUTE / 2
    bursts = []
    while time.monotonic() < began + for_s:
        bursts.append(asyncio.create_task(burst(stack.urls, key, [completion()] * len(stack.urls))))
        await asyncio.sleep(interval_s)
    answers = [answer for answers in await asyncio.gather(*bursts) for answer in answers]
    return answers, time.monotonic() - began


async def open_all_connections(url: str, key: str) -> None:
    """Of a gateway that gets its answers late: opening them then would take several times as long."""
    asking = []
    for _ in range(8):
        asking.append(asyncio.create_task(burst([url], key, [completion()])))
        await asyncio.sleep(0.02)  # so that each is sent by itself
    await asyncio.gather(*asking)


async def check_that_no_more_is_let_in_than_the_limit(stack: Stack, proxy: TcpProxy, for_s: float) -> None:
    key = stack.key()
    await burst(stack.urls, key, [completion()] * 30)  # the burst is spent, and all gateways know the key
    proxy.delay_s = 0.2
    await open_all_connections(stack.urls[-1], key)
    proxy.delay_s = DELAY_S
    try:
        answers, took_s = await load(stack, key, for_s)
    finally:
        proxy.delay_s = 0.0
    num_passed = sum(answer.status == 200 for answer in answers)
    slowest = max(answer.took_s for answer in answers)
    print(f"{num_passed} of {len(answers)} in {took_s:.1f} s, the slowest after {slowest:.1f} s")
    assert {answer.status for answer in answers} == {200, 429}
    assert slowest > DELAY_S, "nobody was late"
    assert num_passed <= BURST + took_s * PER_MINUTE / 60
    # And no less: whoever is let in by one is not refused for it by another's clock.
    assert num_passed >= (for_s - 1) * PER_MINUTE / 60 * 0.7


async def test_wrong_clocks_and_late_commands_let_in_no_more_than_the_limit(stack, proxy):
    await check_that_no_more_is_let_in_than_the_limit(stack, proxy, 2.5)


@pytest.mark.soak
async def test_wrong_clocks_and_late_commands_let_in_no_more_for_minutes(stack, proxy):
    await check_that_no_more_is_let_in_than_the_limit(stack, proxy, 120.0)


async def test_retry_after_is_right_at_every_gateway_whatever_its_clock_says(stack):
    key = stack.key()
    for url in stack.urls:
        answers = await burst([url], key, [completion()] * (BURST + 5))
        [refused, *_] = [answer for answer in answers if answer.status == 429]
        await asyncio.sleep(int(refused.headers["retry-after"]))
        [again] = await burst([url], key, [completion()])
        assert again.status == 200, url
