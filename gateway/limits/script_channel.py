"""The way of the limits' scripts to Redis: a few connections of their own, each with one batch at a time.

They are redis-py's connections without its pool and its pipeline, which take longer than all else that a
reservation costs the gateway.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any, NamedTuple, TypeVar

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from gateway.limits.dimensions import Dimensions
from gateway.patience import patience

MAX_BATCH = 64  # requests in one command: scripts hold up everybody else
US = 1e6  # the scripts count in microseconds

ItemT = TypeVar("ItemT")


class Script:
    """A script of this package."""

    def __init__(self, name: str, *, has_accounts: bool = True) -> None:
        files = ["accounts.lua", name] if has_accounts else [name]
        folder = resources.files("gateway.limits")
        self.text = "\n".join(folder.joinpath(file).read_text(encoding="utf-8") for file in files)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()  # EVALSHA's


class Call(NamedTuple):
    script: Script
    keys: Sequence[str]
    arguments: Sequence[str | bytes | int]

    @property
    def command(self) -> tuple[str | bytes | int, ...]:
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)


Reply = Any  # what the script returns, or a ResponseError


class Pulse:
    """When Redis has last answered on any of the lanes that share it."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._beaten_at = -math.inf

    def beat(self) -> None:
        self._beaten_at = self._clock()

    def is_felt(self) -> bool:
        """Whether it has answered within the time that a batch may take: then it has much to do, and is not
        silent."""
        return self._clock() - self._beaten_at < self.timeout_s


class Lane:
    """One connection. Its user sends one batch at a time; what was left half-way is closed."""

    def __init__(self, client: redis.asyncio.Redis, pulse: Pulse) -> None:
        # redis-py leaves its own types out here.
        self._connection: AbstractConnection = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        self._pulse = pulse

    async def send(self, calls: Sequence[Call]) -> list[Reply]:
        """What each call returned, in their order. Raises RedisError, OSError, or TimeoutError: whether the
        calls were carried out is unknown then."""
        is_whole = False
        try:
            async with patience(self._pulse.timeout_s, self._pulse.is_felt):
                replies = await self._exchange_once_more_if_cut_off([call.command for call in calls])
                missing = [index for index, one in enumerate(replies) if isinstance(one, NoScriptError)]
                if missing:
                    scripts = {calls[index].script for index in missing}
                    await self._exchange([("SCRIPT", "LOAD", script.text) for script in scripts])
                    again = await self._exchange([calls[index].command for index in missing])
                    for index, reply in zip(missing, again, strict=True):
                        replies[index] = reply
            # After an error the next batch gets a new connection: a server that has become a replica
            # answers that it is read-only for as long as it is asked.
            is_whole = not any(isinstance(reply, ResponseError) for reply in replies)
            self._pulse.beat()
            return replies
        finally:
            if not is_whole:
                await self.close()

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)

    async def _exchange_once_more_if_cut_off(
        self, commands: Sequence[tuple[str | bytes | int, ...]]
    ) -> list[Reply]:
        """A server that was restarted has closed what was open; the scripts do nothing twice."""
        was_open = self._connection.is_connected
        try:
            return await self._exchange(commands)
        except (RedisConnectionError, OSError):
            if not was_open:
                raise
            await self.close()
            return await self._exchange(commands)

    async def _exchange(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Reply]:
        connection = self._connection
        if not connection.is_connected:
            await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Reply] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response())
            except ResponseError as error:
                replies.append(error)
        return replies


def by_dimensions(
    items: Iterable[ItemT], of: Callable[[ItemT], Dimensions]
) -> list[tuple[Dimensions, list[ItemT]]]:
    """Commands are of one key on one route each."""
    groups: defaultdict[Dimensions, list[ItemT]] = defaultdict(list)
    for item in items:
        groups[of(item)].append(item)
    return list(groups.items())
