"""Lets in who has a valid API key or token, and says to others why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from multidict import CIMultiDictProxy

from gateway.auth.caller import Caller
from gateway.auth.client_address import ClientAddresses
from gateway.auth.failure_throttle import FailureThrottle
from gateway.auth.known_keys import KnownKey, KnownKeys, RedisAccess, UnreadableKeyError
from gateway.auth.refusal import Reason
from gateway.auth.secret_digests import SecretDigests
from gateway.breaker import RedisUnavailableError
from gateway.errors import ApiError, invalid_api_key, permission_denied, rate_limited, unavailable
from shared.api_keys import KEY_PREFIX
from shared.config import GatewayConfig
from shared.jwt_config import JwtConfig
from shared.networks import Address, are_within, parse_address
from shared.redis_schema import RedisKeys

if TYPE_CHECKING:
    from gateway.auth.token_verifier import TokenVerifier

REFRESH_INTERVAL_S = 1.0

NO_SUCH_KEY = "Incorrect API key provided."  # also of one that is revoked, which is nobody's business


class Authenticator:
    def __init__(
        self,
        keys: KnownKeys,
        pepper: bytes,
        options: Callable[[], GatewayConfig],
        on_failure: Callable[[Reason], None],
        tokens: TokenVerifier | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`options`: those in force. `tokens`: None where no issuer is configured."""
        self._keys = keys
        self._digests = SecretDigests(pepper)
        self._options = options
        self._on_failure = on_failure
        self._tokens = tokens
        self._wall_clock = wall_clock
        self._take_options(options())

    async def authenticate(self, headers: CIMultiDictProxy[str], peer: str | None) -> Caller:
        """`peer`: address of the socket. Raises ApiError 401, 403, 429, or 503 if it cannot be known."""
        secret = self._secret_in(headers)
        if self._tokens is not None and _is_token(secret):
            return await self._of_token(self._tokens, secret, headers, peer)
        digest = self._digests.of(secret)
        try:
            key = self._keys.fresh(digest) or await self._looked_up(digest, headers, peer)
        except RedisUnavailableError as error:
            raise self._failed(
                "unavailable", unavailable("API keys cannot be checked at the moment.", 1.0)
            ) from error
        except UnreadableKeyError as error:
            raise self._failed("unreadable", unavailable("This API key cannot be checked.")) from error
        self._check(key, headers, peer)
        return key.caller

    async def follow(self) -> None:
        """Takes in what is changed elsewhere, for ever."""
        while True:
            if (options := self._options()) is not self._taken_options:
                self._take_options(options)
            await self._keys.refresh()
            if self._tokens is not None:
                self._tokens.refresh()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()

    def _take_options(self, options: GatewayConfig) -> None:
        self._taken_options = options
        self._addresses = ClientAddresses(options.trusted_proxies, options.client_address_header)
        self._throttle = FailureThrottle(options.max_failed_auth_per_minute)

    async def _looked_up(self, digest: str, headers: CIMultiDictProxy[str], peer: str | None) -> KnownKey:
        if self._keys.is_unknown(digest):
            raise self._failed("unknown", invalid_api_key(NO_SUCH_KEY))
        if self._keys.has_seen(digest):  # not a guess, and so not throttled, whoever else guesses there
            key = await self._keys.look_up(digest)
        else:
            address = self._throttled_address(headers, peer)
            key = await self._keys.look_up(digest)
            if key is None:
                self._throttle.failed(address)
        if key is None:
            raise self._failed("unknown", invalid_api_key(NO_SUCH_KEY))
        return key

    def _check(self, key: KnownKey, headers: CIMultiDictProxy[str], peer: str | None) -> None:
        if key.is_revoked:
            raise self._failed("revoked", invalid_api_key(NO_SUCH_KEY))
        now = self._wall_clock()
        if now < key.not_before:
            raise self._failed("not_yet_valid", invalid_api_key("This API key is not valid yet."))
        if now >= key.not_after:
            raise self._failed("expired", invalid_api_key("This API key has expired."))
        if key.networks:
            address = self._addresses.of(headers, peer)
            if address is None or not are_within(address, key.networks):
                raise self._failed(
                    "address", permission_denied("This API key may not be used from this address.")
                )

    async def _of_token(
        self, tokens: TokenVerifier, token: str, headers: CIMultiDictProxy[str], peer: str | None
    ) -> Caller:
        digest = self._digests.of(token)
        if (caller := tokens.verified(digest)) is not None:
            return caller
        address = self._throttled_address(headers, peer)
        outcome = await tokens.verify(digest, token)
        if isinstance(outcome, Caller):
            return outcome
        if outcome.is_guess:
            self._throttle.failed(address)
        raise self._failed(outcome.reason, outcome.error)

    def _throttled_address(self, headers: CIMultiDictProxy[str], peer: str | None) -> Address | None:
        """Whom a failure is to be counted for. Raises ApiError 429 if there have been too many."""
        address = self._addresses.of(headers, peer) or _address_or_none(peer)
        if wait_s := self._throttle.wait_s(address):
            raise self._failed(
                "throttled",
                rate_limited("Too many unknown API keys have been tried from this address.", wait_s),
            )
        return address

    def _secret_in(self, headers: CIMultiDictProxy[str]) -> str:
        if authorization := headers.get("Authorization"):
            scheme, _, secret = authorization.partition(" ")
            if scheme.lower() == "bearer" and (secret := secret.strip()):
                return secret
            raise self._failed(
                "malformed", invalid_api_key("The Authorization header must be of the form 'Bearer KEY'.")
            )
        if secret := headers.get("x-api-key", "").strip():
            return secret
        raise self._failed(
            "missing",
            invalid_api_key(
                "No API key was provided: set the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'."
            ),
        )

    def _failed(self, reason: Reason, error: ApiError) -> ApiError:
        self._on_failure(reason)
        return error


def make_authenticator(
    options: Callable[[], GatewayConfig],
    issuers: list[JwtConfig],
    keys: RedisKeys,
    prompt: RedisAccess,
    patient: RedisAccess,
    pepper: bytes,
    on_failure: Callable[[Reason], None],
) -> Authenticator:
    """Needs a running event loop; opens no connection yet."""
    return Authenticator(
        KnownKeys(keys, prompt, patient),
        pepper,
        options,
        on_failure,
        _token_verifier(issuers) if issuers else None,
    )


def _token_verifier(issuers: list[JwtConfig]) -> TokenVerifier:
    # Imported here: the libraries would delay each start by a twentieth of a second, also without tokens.
    from gateway.auth.token_verifier import TokenVerifier

    return TokenVerifier(issuers)


def _is_token(secret: str) -> bool:
    return secret.count(".") == 2 and not secret.startswith(KEY_PREFIX)


def _address_or_none(peer: str | None) -> Address | None:
    try:
        return parse_address(peer or "")
    except ValueError:
        return None
