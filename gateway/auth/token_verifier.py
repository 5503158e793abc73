"""From a JSON Web Token (RFC 7519, RFC 8725) to the caller that it stands for."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import jwt

from gateway.auth.caller import Caller
from gateway.auth.refusal import Refusal
from gateway.auth.signing_keys import SigningKeys, SigningKeysUnavailableError
from gateway.errors import ApiError, invalid_api_key, permission_denied, unavailable
from shared.identifiers import TenantId
from shared.jwt_config import JwtConfig

VERIFIED_LIFETIME_S = 60.0  # so long a signature is not checked again
MAX_VERIFIED = 10_000
REQUIRED_CLAIMS = ["iss", "aud", "exp", "sub"]
# The second: for what is not ASCII. Whatever else is made to break it, the library answers for.
_BROKEN = (jwt.PyJWTError, ValueError)


class _Verified(NamedTuple):
    caller: Caller
    until: float  # unix seconds


class _Issuer(NamedTuple):
    config: JwtConfig
    keys: SigningKeys


class TokenVerifier:
    """Needs a running event loop for all but its construction."""

    def __init__(self, issuers: Sequence[JwtConfig], clock: Callable[[], float] = time.monotonic) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._issuers = {
            config.issuer: _Issuer(config, SigningKeys(config, self._open_session, clock))
            for config in issuers
        }
        self._verified: OrderedDict[str, _Verified] = OrderedDict()

    def verified(self, digest: str) -> Caller | None:
        """Of a token that was verified a moment ago. `digest`: of the token."""
        verified = self._verified.get(digest)
        return verified.caller if verified is not None and time.time() < verified.until else None

    async def verify(self, digest: str, token: str) -> Caller | Refusal:
        try:
            unverified = jwt.decode_complete(token, options={"verify_signature": False})
        except _BROKEN:
            return _guess("This is neither an API key nor a token.")
        header, name = unverified["header"], unverified["payload"].get("iss")
        issuer = self._issuers.get(name) if isinstance(name, str) else None
        algorithm, key_id = header.get("alg"), header.get("kid")
        if issuer is None:
            return _guess("The issuer of the token is not one of those that are trusted.")
        if algorithm not in issuer.config.algorithms:
            return _guess("The token is signed with an algorithm that is not allowed.")
        try:
            key = await issuer.keys.get(key_id if isinstance(key_id, str) else None, algorithm)
        except SigningKeysUnavailableError:
            told = "Tokens cannot be checked at the moment: their issuer does not answer."
            return Refusal("unavailable", unavailable(told))
        if key is None:
            return _guess("The token is signed with a key that its issuer does not have.")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=issuer.config.audience,
                issuer=issuer.config.issuer,
                leeway=issuer.config.leeway_s,
                options={"require": REQUIRED_CLAIMS},
            )
        except jwt.ExpiredSignatureError:
            return Refusal("expired", invalid_api_key("The token has expired."))
        except jwt.ImmatureSignatureError:
            return Refusal("not_yet_valid", invalid_api_key("The token is not valid yet."))
        except jwt.InvalidAudienceError:
            return Refusal("bad_token", invalid_api_key("The token is for another audience."))
        except jwt.MissingRequiredClaimError as error:
            return Refusal("bad_token", invalid_api_key(f"The token has no claim {error.claim!r}."))
        except _BROKEN:
            return _guess("The token is not valid.")
        try:
            caller = _caller(claims, issuer.config)
        except ApiError as error:
            return Refusal("no_tenant", error)
        self._remember(digest, caller, int(claims["exp"]) + issuer.config.leeway_s)
        return caller

    def refresh(self) -> None:
        """Has signing keys fetched that are older than configured."""
        for issuer in self._issuers.values():
            issuer.keys.refresh()

    async def close(self) -> None:
        for issuer in self._issuers.values():
            await issuer.keys.close()
        if self._session is not None:
            await self._session.close()

    def _remember(self, digest: str, caller: Caller, until: float) -> None:
        self._verified[digest] = _Verified(caller, min(until, time.time() + VERIFIED_LIFETIME_S))
        self._verified.move_to_end(digest)
        if len(self._verified) > MAX_VERIFIED:
            self._verified.popitem(last=False)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session


def _guess(message: str) -> Refusal:
    return Refusal("bad_token", invalid_api_key(message), is_guess=True)


def _caller(claims: dict[str, Any], config: JwtConfig) -> Caller:
    """Raises ApiError 403."""
    subject = f"{config.issuer}\0{claims['sub']}".encode("utf-8", "surrogatepass")
    return Caller(
        key_id=f"jwt:{hashlib.sha256(subject).hexdigest()[:16]}",
        tenant=_tenant(claims, config),
        models=_models(claims, config),
    )


def _tenant(claims: dict[str, Any], config: JwtConfig) -> TenantId:
    if config.tenant is not None:
        return TenantId(config.tenant)
    assert config.tenant_claim is not None, "one of the two is set"
    tenant = claims.get(config.tenant_claim)
    if not isinstance(tenant, str):
        raise permission_denied(f"The token names no tenant in its claim {config.tenant_claim!r}.")
    if config.tenants is not None and tenant not in config.tenants:
        raise permission_denied("The issuer of the token may not speak for this tenant.")
    return TenantId(tenant)


def _models(claims: dict[str, Any], config: JwtConfig) -> frozenset[str] | None:
    if config.models_claim is None:
        return None
    models = claims.get(config.models_claim)
    if isinstance(models, str):
        models = models.split()
    if not isinstance(models, list):
        return frozenset()  # whoever says nothing has allowed nothing
    return frozenset(model for model in models if isinstance(model, str))
