"""Who asks: from an API key to its record."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import redis.asyncio

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import invalid_api_key, unavailable
from shared.api_keys import digest_of
from shared.redis_schema import ApiKeyRecord, RedisKeys, from_json

POSITIVE_LIFETIME_S = 5.0  # so a revoked key is refused after five seconds at the latest
NEGATIVE_LIFETIME_S = 1.0
STALE_LIFETIME_S = 300.0  # a known key keeps working for so long while Redis cannot be asked
MAX_CACHED_KEYS = 10_000


class _Cached(NamedTuple):
    record: ApiKeyRecord | None
    looked_up_at: float


class Authenticator:
    """Looks keys up by their HMAC; holds a short cache of answers."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        pepper: bytes,
        breaker: RedisBreaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._keys = keys
        self._pepper = pepper
        self._breaker = breaker
        self._clock = clock
        self._cache: OrderedDict[str, _Cached] = OrderedDict()

    async def authenticate(self, headers: Mapping[str, str]) -> ApiKeyRecord:
        """The record of the key in these headers. Raises ApiError 401, or 503 if it cannot be known."""
        secret = _secret_in(headers)
        digest = digest_of(secret, self._pepper)
        record = await self._look_up(digest)
        if record is None:
            raise invalid_api_key("Incorrect API key provided.")
        return record

    async def _look_up(self, digest: str) -> ApiKeyRecord | None:
        cached = self._cache.get(digest)
        now = self._clock()
        if cached is not None:
            lifetime_s = POSITIVE_LIFETIME_S if cached.record else NEGATIVE_LIFETIME_S
            if now - cached.looked_up_at < lifetime_s:
                return cached.record
        try:
            value = await self._breaker.call(lambda: self._client.get(self._keys.api_key(digest)))
        except RedisUnavailableError as error:
            if cached is not None and cached.record and now - cached.looked_up_at < STALE_LIFETIME_S:
                return cached.record
            raise unavailable("API keys cannot be checked at the moment.", 1.0) from error
        record = from_json(ApiKeyRecord, value) if value is not None else None
        self._cache[digest] = _Cached(record, now)
        self._cache.move_to_end(digest)
        if len(self._cache) > MAX_CACHED_KEYS:
            self._cache.popitem(last=False)
        return record


def _secret_in(headers: Mapping[str, str]) -> str:
    if authorization := headers.get("Authorization"):
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() == "bearer" and secret.strip():
            return secret.strip()
        raise invalid_api_key("The Authorization header must be of the form 'Bearer KEY'.")
    if secret := headers.get("x-api-key", "").strip():
        return secret
    raise invalid_api_key(
        "No API key was provided: set the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'."
    )
