"""One slow call to Redis is enough to know."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.breaker import OPEN_FOR_S, RedisBreaker, RedisUnavailableError


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


async def test_after_a_failure_redis_is_not_asked_for_a_second():
    world = World()
    world.is_up = False
    for _ in range(5):
        with pytest.raises(RedisUnavailableError):
            await world.call()
    assert world.num_calls == 1


async def test_it_recovers_by_itself():
    world = World()
    world.is_up = False
    with pytest.raises(RedisUnavailableError):
        await world.call()
    world.is_up = True
    world.now += OPEN_FOR_S
    assert await world.call() == "answer"
    assert await world.call() == "answer"


async def test_failures_and_recoveries_are_logged_once_each(caplog):
    world = World()
    world.is_up = False
    for _ in range(3):
        with pytest.raises(RedisUnavailableError):
            await world.call()
        world.now += OPEN_FOR_S
    world.is_up = True
    await world.call()
    await world.call()
    assert len(caplog.records) == 2
