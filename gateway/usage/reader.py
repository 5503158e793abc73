"""Sums of the usage rows that there are, of all gateways: in a process of its own, which nobody waits for.

The latest 100,000 rows of Redis take seconds of Python. In a thread of the gateway they would take them from
every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import redis

from shared.config import HeadraceConfig
from shared.errors import ConfigError
from shared.redis_client import connect
from shared.redis_schema import RedisKeys
from shared.usage_database import UsageDatabase, UsageFilter
from shared.usage_source import FoundUsage, UsageSource, file_source, stream_source

ANSWER_TIMEOUT_S = 120.0
REDIS_TIMEOUT_MS = 2000
NICENESS = 5


class UsageUnreadableError(Exception):
    """At the moment: Redis is away, or the file is."""


class _Question(msgspec.Struct, frozen=True):
    redis_url: str  # with its password: over a pipe, not where processes are listed
    namespace: str
    sqlite: str | None
    wanted: UsageFilter
    by: list[str]


class _Answer(msgspec.Struct, frozen=True):
    found: FoundUsage | None = None
    error: str = ""


class UsageReader:
    def __init__(self, config: HeadraceConfig, redis_url: str) -> None:
        self._config = config
        self._redis_url = redis_url
        self._turn = asyncio.Lock()  # one after another: each may have all rows in its memory

    async def sums(self, wanted: UsageFilter, by: Sequence[str]) -> FoundUsage:
        """From the file if there is one, else from what Redis still has. Raises UsageUnreadableError."""
        config = self._config
        question = _Question(self._redis_url, config.redis.namespace, config.usage.sqlite, wanted, list(by))
        async with self._turn:
            answer = await _ask_process(msgspec.json.encode(question))
        if answer.found is None:
            raise UsageUnreadableError(answer.error)
        return answer.found


async def _ask_process(question: bytes) -> _Answer:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.usage.reader"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            output, _ = await process.communicate(question)
        return msgspec.json.decode(output, type=_Answer)
    except TimeoutError:
        return _Answer(error=f"it takes longer than {ANSWER_TIMEOUT_S:.0f} s")
    except msgspec.DecodeError:
        return _Answer(error="the process that reads it has died")  # and has said why in the log
    finally:
        if process.returncode is None:  # also when the client has left
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                process.kill()


def main() -> None:
    """One question on stdin, its answer on stdout."""
    os.nice(NICENESS)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
    try:
        answer = _Answer(_found(question))
    except (sqlite3.Error, redis.RedisError, ConfigError) as error:
        answer = _Answer(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def _found(question: _Question) -> FoundUsage:
    source = _source(question)
    rows = source.database.sums(question.wanted, question.by)
    return FoundUsage(rows, source.incomplete_until, source.num_left_out)


def _source(question: _Question) -> UsageSource:
    file = question.sqlite
    if file is not None and not Path(file).exists():  # this very gateway would have made it
        return UsageSource(UsageDatabase.in_memory(), file)
    if (source := file_source(file)) is not None:
        return source
    client = connect(question.redis_url, REDIS_TIMEOUT_MS)
    return stream_source(client, RedisKeys(question.namespace), question.wanted)


if __name__ == "__main__":
    main()
