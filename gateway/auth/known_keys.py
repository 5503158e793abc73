"""API keys as this gateway last saw them in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis.asyncio

from gateway.auth.caller import Caller
from gateway.breaker import RedisBreaker, RedisUnavailableError
from shared.networks import Network, parse_network
from shared.redis_schema import ApiKeyRecord, RedisKeys, from_json

logger = logging.getLogger(__name__)

LIFETIME_S = 5.0  # so a revoked key is refused after it at the latest, as long as Redis answers
UNKNOWN_LIFETIME_S = 1.0
STALE_LIFETIME_S = 300.0  # a known key keeps working for so long while Redis cannot be asked
MAX_KEYS = 10_000
MAX_UNKNOWN = 10_000
NUM_READ_AT_ONCE = 200


class UnreadableKeyError(Exception):
    """Redis has something under this digest that is no key."""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key with one of its secrets. Times are unix seconds: valid from `not_before` until `not_after`."""

    caller: Caller
    is_revoked: bool
    not_before: float
    not_after: float
    networks: tuple[Network, ...]  # of clients; empty: any


@dataclass(frozen=True, slots=True)
class _Seen:
    key_id: bytes
    stored: bytes
    key: KnownKey | None  # None: it cannot be read
    looked_up_at: float  # before Redis was asked


class RedisAccess(NamedTuple):
    client: redis.asyncio.Redis
    breaker: RedisBreaker

    async def ask(self, operation: Callable[[Any], Awaitable[Any]]) -> Any:
        """What Redis answers to `operation`, which is given the client. Raises RedisUnavailableError."""
        return await self.breaker.call(lambda: operation(self.client))


class KnownKeys:
    """A cache, by digest. Holds what Redis said less than five seconds ago, and follows its changes."""

    def __init__(
        self,
        keys: RedisKeys,
        prompt: RedisAccess,
        patient: RedisAccess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prompt`: for keys that were seen before, which can do without an answer. `patient`: for those that
        are new, which could only be refused."""
        self._names = keys
        self._prompt = prompt
        self._patient = patient
        self._clock = clock
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        # Apart, so that nobody drives the known ones out by guessing.
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._looking: dict[str, asyncio.Task[KnownKey | None]] = {}
        self._version: bytes | None = None

    def fresh(self, digest: str) -> KnownKey | None:
        """The key, if it need not be looked up. Raises UnreadableKeyError."""
        seen = self._seen.get(digest)
        if seen is None or self._clock() - seen.looked_up_at >= LIFETIME_S:
            return None
        return _readable(seen)

    def has_seen(self, digest: str) -> bool:
        return digest in self._seen

    def is_unknown(self, digest: str) -> bool:
        """Whether Redis did not have it a moment ago."""
        looked_up_at = self._unknown.get(digest)
        return looked_up_at is not None and self._clock() - looked_up_at < UNKNOWN_LIFETIME_S

    async def look_up(self, digest: str) -> KnownKey | None:
        """None: there is no such key. Raises RedisUnavailableError or UnreadableKeyError.

        Who comes while the same key is being looked up waits for that.
        """
        looking = self._looking.get(digest)
        if looking is None:
            looking = self._looking[digest] = asyncio.create_task(self._look_up(digest))
            looking.add_done_callback(functools.partial(self._has_looked, digest))
        return await asyncio.shield(looking)

    def _has_looked(self, digest: str, looking: asyncio.Task[KnownKey | None]) -> None:
        self._looking.pop(digest, None)
        if not looking.cancelled():
            looking.exception()  # whoever waited has got it; perhaps nobody waits any more

    async def _look_up(self, digest: str) -> KnownKey | None:
        now, seen = self._clock(), self._seen.get(digest)
        try:
            if seen is not None:
                key_id: bytes | None = seen.key_id
                stored = await self._prompt.ask(lambda redis: redis.hget(self._names.api_keys, key_id))
            else:
                key_id, stored = await self._first_look(digest)
        except RedisUnavailableError:
            if seen is not None and now - seen.looked_up_at < STALE_LIFETIME_S:
                return _readable(seen)
            raise
        return self._take_in(digest, key_id, stored, now)

    async def refresh(self) -> None:
        """Reads all known keys again if any key has been written since the last time."""
        try:
            version = await self._patient.ask(lambda redis: redis.get(self._names.api_keys_version))
            if version == self._version:
                return
            await self._read_again()
        except RedisUnavailableError:
            return  # and so tried again the next time
        self._version = version

    async def _first_look(self, digest: str) -> tuple[bytes | None, bytes | None]:
        """The id of its key, and that key as stored."""
        key_id = await self._patient.ask(lambda redis: redis.hget(self._names.api_key_digests, digest))
        if key_id is None:
            return None, None
        return key_id, await self._patient.ask(lambda redis: redis.hget(self._names.api_keys, key_id))

    async def _read_again(self) -> None:
        everything = list(self._seen.items())
        for begin in range(0, len(everything), NUM_READ_AT_ONCE):
            batch = everything[begin : begin + NUM_READ_AT_ONCE]
            now, values = self._clock(), await self._records([seen.key_id for _, seen in batch])
            for (digest, seen), stored in zip(batch, values, strict=True):
                # One that cannot be read is logged; whoever uses it will be told.
                with contextlib.suppress(UnreadableKeyError):
                    self._take_in(digest, seen.key_id, stored, now)

    async def _records(self, key_ids: list[bytes]) -> list[bytes | None]:
        records: list[bytes | None] = await self._patient.ask(
            lambda redis: redis.hmget(self._names.api_keys, key_ids)
        )
        return records

    def _take_in(
        self, digest: str, key_id: bytes | None, stored: bytes | None, looked_up_at: float
    ) -> KnownKey | None:
        """What Redis said, unless one who asked later was answered before. Raises UnreadableKeyError."""
        seen = self._seen.get(digest)
        if seen is not None and seen.looked_up_at > looked_up_at:
            return _readable(seen)
        if self._unknown.get(digest, -math.inf) > looked_up_at:
            return None
        if key_id is None or stored is None:
            self._forget(digest, looked_up_at)
            return None
        if seen is not None and seen.stored == stored:
            key = seen.key
        else:
            try:
                key = _known_key(from_json(ApiKeyRecord, stored), digest)
            except ValueError as error:  # msgspec's errors are, too
                logger.error("the API key %r in Redis cannot be read and is refused: %s", key_id, error)
                key = None
            else:
                if key is None:
                    self._forget(digest, looked_up_at)
                    return None
        seen = self._seen[digest] = _Seen(key_id, stored, key, looked_up_at)
        self._seen.move_to_end(digest)
        if len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        return _readable(seen)

    def _forget(self, digest: str, looked_up_at: float) -> None:
        self._seen.pop(digest, None)
        self._unknown[digest] = looked_up_at
        self._unknown.move_to_end(digest)
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)


def _readable(seen: _Seen) -> KnownKey:
    if seen.key is None:
        raise UnreadableKeyError(repr(seen.key_id))
    return seen.key


def _known_key(record: ApiKeyRecord, digest: str) -> KnownKey | None:
    """None: the key no longer has this secret. Raises ValueError for networks that are none."""
    secret = next((secret for secret in record.secrets if secret.digest == digest), None)
    if secret is None:
        return None
    ends = [end for end in (record.not_after, secret.not_after) if end is not None]
    return KnownKey(
        caller=Caller(
            key_id=record.key_id,
            tenant=record.tenant,
            models=None if record.models is None else frozenset(record.models),
            limits=record.limits,
        ),
        is_revoked=record.revoked_at is not None,
        not_before=-math.inf if record.not_before is None else record.not_before,
        not_after=min(ends, default=math.inf),
        networks=tuple(parse_network(cidr) for cidr in record.cidrs),
    )
