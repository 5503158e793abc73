"""The public keys of an issuer of tokens: fetched, kept, and fetched again (JWK sets, RFC 7517)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from jwt import PyJWK, PyJWKError
from jwt.exceptions import InvalidKeyError

from shared.jwt_config import JwtConfig

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 2.0  # between two attempts, whatever keys tokens name: anybody can make those names up
FETCH_TIMEOUT_S = 5.0
MAX_DOCUMENT_BYTES = 2**20
DISCOVERY_PATH = "/.well-known/openid-configuration"  # OpenID Connect Discovery 1.0, section 4


class _Discovery(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class SigningKeysUnavailableError(Exception):
    """Whether there is such a key cannot be known, because the issuer does not answer."""


class SigningKeys:
    """The last set that could be fetched holds until a newer one comes, also while the issuer is away."""

    def __init__(
        self,
        config: JwtConfig,
        session: Callable[[], aiohttp.ClientSession],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._session = session
        self._clock = clock
        self._keys: dict[tuple[str | None, str], PyJWK] = {}  # by `kid` and algorithm
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._has_failed = False
        self._fetching: asyncio.Task[None] | None = None

    async def get(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """None: the issuer has no such key. Raises SigningKeysUnavailableError."""
        name = (key_id, algorithm)
        if name not in self._keys and (fetching := self._start_fetch()) is not None:
            await asyncio.shield(fetching)  # a client that leaves must not end what others wait for, too
        if name not in self._keys and self._has_failed:
            raise SigningKeysUnavailableError(self._config.issuer)
        return self._keys.get(name)

    def refresh(self) -> None:
        """Starts to fetch if the set has had its time."""
        if self._fetched_at is None or self._clock() - self._fetched_at >= self._config.jwks_lifetime_s:
            self._start_fetch()

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _start_fetch(self) -> asyncio.Task[None] | None:
        """The fetch that is under way, a new one, or None if the last one was a moment ago."""
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        now = self._clock()
        if self._tried_at is not None and now - self._tried_at < MIN_INTERVAL_S:
            return None
        self._tried_at = now
        self._fetching = asyncio.create_task(self._fetch(), name=f"keys of {self._config.issuer}")
        return self._fetching

    async def _fetch(self) -> None:
        try:
            url = self._config.jwks_url or await self._discovered_url()
            key_set = msgspec.json.decode(await self._document(url), type=_KeySet)
            keys = _usable_keys(key_set.keys, self._config.algorithms)
            if not keys:
                raise ValueError(f"{url} has no key for any of {', '.join(self._config.algorithms)}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            if not self._has_failed:
                logger.warning(
                    "the keys of %s cannot be fetched: %s", self._config.issuer, error or "timeout"
                )
            self._has_failed = True
            return
        if self._has_failed:
            logger.warning("the keys of %s can be fetched again", self._config.issuer)
        self._keys, self._fetched_at, self._has_failed = keys, self._clock(), False

    async def _discovered_url(self) -> str:
        url = self._config.issuer.rstrip("/") + DISCOVERY_PATH
        discovery = msgspec.json.decode(await self._document(url), type=_Discovery)
        if discovery.issuer != self._config.issuer:
            raise ValueError(f"{url} is about {discovery.issuer!r}")
        self._config.check_url(discovery.jwks_uri)
        return discovery.jwks_uri

    async def _document(self, url: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
        # A redirect could lead to where check_url would not.
        async with self._session().get(url, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"{url} answers {response.status}")
            document = bytearray()
            async for part in response.content.iter_any():
                document += part
                if len(document) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"{url} answers more than {MAX_DOCUMENT_BYTES} bytes")
            return bytes(document)


def _usable_keys(entries: list[dict[str, Any]], algorithms: list[Any]) -> dict[tuple[str | None, str], PyJWK]:
    """By `kid` and algorithm; the one key of an algorithm that has a single one by None, too."""
    keys: dict[tuple[str | None, str], PyJWK] = {}
    for algorithm in algorithms:
        named = {}
        for number, entry in enumerate(entries):
            if (key := _key(entry, algorithm)) is not None:
                key_id = entry.get("kid")
                named[key_id if isinstance(key_id, str) else number] = key
        keys |= {(name, algorithm): key for name, key in named.items() if isinstance(name, str)}
        if len(named) == 1:
            keys[None, algorithm] = next(iter(named.values()))
    return keys


def _key(entry: dict[str, Any], algorithm: str) -> PyJWK | None:
    """None: it is not for signatures of this kind. Sets hold keys for other purposes as well."""
    if entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm:
        return None
    try:
        if "verify" not in entry.get("key_ops", ["verify"]):
            return None
        return PyJWK(entry, algorithm)
    except (PyJWKError, InvalidKeyError, ValueError, TypeError, KeyError):
        return None
