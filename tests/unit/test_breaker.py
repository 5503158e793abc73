"""A few slow calls to Redis are enough to know, and one is not."""

import asyncio
import time

import pytest
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.breaker import NUM_FAILURES, OPEN_FOR_S, QUIET_S, RedisBreaker, RedisUnavailableError, told
from gateway.patience import patience


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_calls = 0
        self.is_up = True
        self.breaker = RedisBreaker(lambda: self.now)

    async def operation(self) -> str:
        self.num_calls += 1
        if not self.is_up:
            raise RedisConnectionError("refused")
        return "answer"

    async def call(self) -> str:
        return await self.breaker.call(self.operation)

    async def fail(self, times: int) -> None:
        self.is_up = False
        for _ in range(times):
            with pytest.raises(RedisUnavailableError):
                await self.call()


async def test_after_some_failures_in_a_row_redis_is_not_asked_for_a_second():
    world = World()
    await world.fail(NUM_FAILURES + 5)
    assert world.num_calls == NUM_FAILURES
    world.now += OPEN_FOR_S
    await world.fail(5)
    assert world.num_calls == NUM_FAILURES + 1  # the probe


async def test_failures_between_successes_switch_nothing_off():
    world = World()
    for _ in range(5):
        await world.fail(NUM_FAILURES - 1)
        world.is_up = True
        assert await world.call() == "answer"


async def test_it_recovers_by_itself():
    world = World()
    await world.fail(NUM_FAILURES)
    world.is_up = True
    world.now += OPEN_FOR_S
    assert await world.call() == "answer"
    assert await world.call() == "answer"


async def test_failures_and_recoveries_are_logged_once_each(caplog):
    world = World()
    await world.fail(NUM_FAILURES)
    for _ in range(3):
        world.now += OPEN_FOR_S
        await world.fail(1)
    world.now += OPEN_FOR_S
    world.is_up = True
    await world.call()
    await world.call()
    assert len(caplog.records) == 2


async def test_a_redis_that_comes_and_goes_does_not_fill_the_log(caplog):
    world = World()
    for _ in range(30):  # in a minute
        await world.fail(NUM_FAILURES)
        world.now += OPEN_FOR_S
        world.is_up = True
        await world.call()
        world.now += 1.0
    assert len(caplog.records) <= 4


async def test_an_outage_that_was_not_told_at_once_is_told_when_it_lasts(caplog):
    world = World()
    for _ in range(2):
        await world.fail(NUM_FAILURES)
        world.now += OPEN_FOR_S
        world.is_up = True
        await world.call()
    assert len(caplog.records) == 2
    await world.fail(NUM_FAILURES)
    world.now += QUIET_S
    await world.fail(1)
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RedisTimeoutError("Timeout reading from socket"), "it is silent"),
        (TimeoutError("no answer in time"), "it is silent"),
        (RedisConnectionError("Error 111 connecting"), "it cannot be reached"),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "answers with an error"),
        (ReadOnlyError("You can't write against a read only replica."), "answers with an error: You can't"),
        (BusyLoadingError("Redis is loading the dataset in memory"), "answers with an error: Redis is load"),
    ],
)
def test_a_silent_redis_is_told_from_one_that_refuses(error, expected):
    assert expected in told(error)


async def test_a_call_is_not_waited_for_longer_than_its_limit():
    breaker = RedisBreaker(limit_s=0.02)
    with pytest.raises(RedisUnavailableError):
        await breaker.call(asyncio.Event().wait)


async def test_an_answer_that_has_come_while_this_process_stood_still_counts():
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(*await _listening("answer"))
    try:
        await reader.readexactly(1)
        loop.call_soon(time.sleep, 0.1)  # longer than the limit; the rest of the answer is there already
        async with patience(0.03):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert await reader.readexactly(5) == b"nswer"
    finally:
        writer.close()


async def test_whoever_is_cancelled_while_it_waits_is_cancelled():
    async def wait() -> None:
        async with patience(10):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _listening(text: str) -> tuple[str, int]:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text.encode())
        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    return host, port
