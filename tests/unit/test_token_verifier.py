"""Tokens of an issuer on loopback: which are taken, for whom, and what becomes of it when it is away."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gateway.auth.caller import Caller
from gateway.auth.refusal import Refusal
from gateway.auth.signing_keys import MAX_DOCUMENT_BYTES, MIN_INTERVAL_S
from gateway.auth.token_verifier import VERIFIED_LIFETIME_S, TokenVerifier
from shared.config import parse_config
from shared.errors import ConfigError
from shared.jwt_config import JwtConfig
from tests.token_issuer import AUDIENCE, TokenIssuer


@pytest.fixture
def issuer() -> Iterator[TokenIssuer]:
    with TokenIssuer() as issuer:
        issuer.add_key("one")
        yield issuer


class World:
    def __init__(self, issuer: TokenIssuer, **config: Any) -> None:
        self.now = 1000.0
        config = {"issuer": issuer.url, "audience": AUDIENCE, "tenant": "acme", **config}
        if config["tenant"] is None:
            del config["tenant"]
        self.verifier = TokenVerifier([JwtConfig.model_validate(config)], clock=lambda: self.now)

    async def ask(self, token: str) -> Caller | Refusal:
        return await self.verifier.verify(token, token)

    async def caller(self, token: str) -> Caller:
        outcome = await self.ask(token)
        assert isinstance(outcome, Caller), outcome
        return outcome

    async def refusal(self, token: str) -> tuple[int, str, bool]:
        outcome = await self.ask(token)
        assert isinstance(outcome, Refusal), outcome
        return outcome.error.status, outcome.reason, outcome.is_guess


@pytest.fixture
async def make_world(issuer: TokenIssuer) -> AsyncIterator[Any]:
    worlds: list[World] = []

    def make(**config: Any) -> World:
        worlds.append(World(issuer, **config))
        return worlds[-1]

    yield make
    for world in worlds:
        await world.verifier.close()


@pytest.fixture
async def world(make_world: Any) -> World:
    return make_world()


async def test_a_token_stands_for_a_tenant_and_its_subject_for_a_key(world, issuer) -> None:
    ann = await world.caller(issuer.token("one"))
    assert (ann.tenant, ann.models, ann.limits) == ("acme", None, None)
    assert ann.key_id.startswith("jwt:")
    assert "ann" not in ann.key_id
    assert (await world.caller(issuer.token("one", iat=1))).key_id == ann.key_id
    assert (await world.caller(issuer.token("one", sub="bob"))).key_id != ann.key_id
    assert issuer.num_fetches == 1
    await world.caller(issuer.token("one", sub="\ud800", exp=10**400))


@pytest.mark.parametrize(
    ("changes", "status", "reason", "is_guess"),
    [
        ({"exp": 1}, 401, "expired", False),
        ({"nbf": 2**40}, 401, "not_yet_valid", False),
        ({"aud": "somebody else"}, 401, "bad_token", False),
        ({"aud": None}, 401, "bad_token", False),
        ({"exp": None}, 401, "bad_token", False),
        ({"sub": None}, 401, "bad_token", False),
        ({"iss": "https://elsewhere.example"}, 401, "bad_token", True),
        ({"iss": None}, 401, "bad_token", True),
        ({"iss": ["x"]}, 401, "bad_token", True),
        ({"exp": 1e400}, 401, "bad_token", True),
        ({"exp": "soon"}, 401, "bad_token", True),
        ({"sub": 7}, 401, "bad_token", True),
    ],
)
async def test_claims_are_checked(world, issuer, changes, status, reason, is_guess) -> None:
    if "iss" in changes and not isinstance(changes["iss"], str | None):  # which the library would not sign
        token = forged(issuer, {"alg": "ES256", "kid": "one"}, issuer.claims(**changes))
    else:
        token = issuer.token("one", **changes)
    assert await world.refusal(token) == (status, reason, is_guess)


async def test_clocks_may_differ_by_the_leeway(make_world, issuer) -> None:
    now = int(time.time())
    world = make_world(leeway_s=20)
    await world.caller(issuer.token("one", exp=now - 10))
    await world.caller(issuer.token("one", nbf=now + 10))
    assert (await world.refusal(issuer.token("one", exp=now - 30)))[1] == "expired"
    assert (await world.refusal(issuer.token("one", nbf=now + 30)))[1] == "not_yet_valid"


def encoded(document: Any) -> str:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def forged(issuer: TokenIssuer, header: Any, claims: Any, signature: bytes = b"x" * 64) -> str:
    return f"{encoded(header)}.{encoded(claims)}.{encoded(signature)}"


async def test_nobody_gets_in_without_the_issuers_private_key(world, issuer) -> None:
    good = issuer.token("one")
    head, claims, signature = good.split(".")
    other = encoded(issuer.claims(sub="root"))
    issuer.add_key("unpublished", is_published=False)
    public = issuer.private_key("one").public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for token in (
        f"{head}.{other}.{signature}",
        f"{head}.{claims}.{signature[:-8]}AAAAAAAA",
        f"{head}.{claims}.",
        forged(issuer, {"alg": "none"}, issuer.claims(), b""),
        forged(issuer, {"alg": "NONE", "kid": "one"}, issuer.claims(), b""),
        forged(issuer, {"kid": "one"}, issuer.claims()),
        forged(issuer, {"alg": ["ES256"], "kid": "one"}, issuer.claims()),
        forged(issuer, {"alg": "ES256", "kid": ["one"]}, issuer.claims()),
        # The public key as a shared one: what libraries that trust the header fall for.
        signed_by_hand(issuer, "HS256", pem),
        issuer.token("unpublished"),
        issuer.token("unpublished", headers={"kid": "one"}),
        issuer.token("unpublished", headers={"kid": "one", "jwk": issuer.published[0], "jku": issuer.url}),
        forged(issuer, b"[" * 5000, issuer.claims()),
        forged(issuer, {"alg": "ES256", "kid": "one"}, b"[" * 4000),
        forged(issuer, {"alg": "ES256", "kid": "one"}, b"\xff"),
        forged(issuer, {"alg": "ES256", "kid": "one", "crit": ["exp"]}, issuer.claims()),
        "..",
        "a.b.c",
        "é.\udcff.ü",
    ):
        status, reason, is_guess = await world.refusal(token)
        assert (status, reason, is_guess) == (401, "bad_token", True), token
        assert world.verifier.verified(token) is None
    await world.caller(good)


def signed_by_hand(issuer: TokenIssuer, algorithm: str, secret: bytes) -> str:
    signed = f"{encoded({'alg': algorithm, 'kid': 'one'})}.{encoded(issuer.claims())}"
    return f"{signed}.{encoded(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


async def test_an_algorithm_that_is_not_configured_is_refused(make_world, issuer) -> None:
    issuer.add_key("rsa", "RS256")
    assert (await make_world(algorithms=["ES256"]).refusal(issuer.token("rsa")))[1] == "bad_token"
    await make_world().caller(issuer.token("rsa"))
    ps256 = jwt.encode(issuer.claims(), issuer.private_key("rsa"), "PS256", headers={"kid": "rsa"})
    assert (await make_world().refusal(ps256))[1] == "bad_token"
    await make_world(algorithms=["PS256"]).caller(ps256)


async def test_the_tenant_and_the_models_can_be_claims(make_world, issuer) -> None:
    world = make_world(tenant=None, tenant_claim="org", tenants=["a", "b"], models_claim="scope")
    caller = await world.caller(issuer.token("one", org="a", scope="chat mail"))
    assert (caller.tenant, caller.models) == ("a", frozenset(("chat", "mail")))
    assert (await world.caller(issuer.token("one", org="b", scope=["chat", 3]))).models == {"chat"}
    for scope in (None, [], "", 7, {"chat": 1}):
        token = issuer.token("one", org="b", scope=scope)
        models = (await world.caller(token)).models
        assert models == frozenset(), scope
    for org in ("c", None, 3, ["a"]):
        assert (await world.refusal(issuer.token("one", org=org)))[:2] == (403, "no_tenant"), org


async def test_a_verified_token_is_remembered_until_it_expires_or_for_a_minute(
    world, issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    long, short = issuer.token("one", exp=int(now) + 3600), issuer.token("one", exp=int(now) + 10)
    assert world.verifier.verified(long) is None
    for token in (long, short):
        caller = await world.caller(token)
        assert world.verifier.verified(token) is caller
    monkeypatch.setattr(time, "time", lambda: now + 42)  # the leeway is 30
    assert world.verifier.verified(short) is None
    assert world.verifier.verified(long) is not None
    monkeypatch.setattr(time, "time", lambda: now + VERIFIED_LIFETIME_S + 1)
    assert world.verifier.verified(long) is None


async def test_a_new_signing_key_is_fetched_when_a_token_names_it_but_not_for_each_made_up_one(
    world, issuer
) -> None:
    await world.caller(issuer.token("one"))
    issuer.add_key("two")
    assert (await world.refusal(issuer.token("two")))[1] == "bad_token"  # just fetched
    world.now += MIN_INTERVAL_S
    await world.caller(issuer.token("two"))
    await world.caller(issuer.token("one"))
    assert issuer.num_fetches == 2
    for number in range(20):
        assert (await world.refusal(issuer.token("one", headers={"kid": f"made up {number}"})))[0] == 401
    assert issuer.num_fetches == 2
    issuer.remove_key("one")
    world.now += 301
    world.verifier.refresh()
    await world.verifier._issuers[issuer.url].keys._fetching
    assert (await world.refusal(issuer.token("one")))[1] == "bad_token"


async def test_without_a_kid_a_set_of_one_key_is_enough(world, issuer) -> None:
    plain = jwt.encode(issuer.claims(), issuer.private_key("one"), "ES256")
    await world.caller(plain)
    issuer.add_key("two")
    world.now += 301
    world.verifier.refresh()
    await world.verifier._issuers[issuer.url].keys._fetching
    assert (await world.refusal(plain))[1] == "bad_token"


@pytest.mark.parametrize(
    "trouble",
    [
        {"status": 500},
        {"status": 302},
        {"answer": b"<html>"},
        {"answer": b'{"keys": []}'},
        {"answer": b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "HS256"}]}'},
        {"answer": b'{"keys": [{"kty": "EC", "kid": "one"}, {"kty": 3}, {}, {"kty": "RSA", "key_ops": 1}]}'},
        {"answer": b'{"keys": 3}'},
        {"answer": b"[" * 100_000},
        {"padding": b" " * MAX_DOCUMENT_BYTES},
        {"claimed_issuer": "https://elsewhere.example"},
        {"jwks_url": "http://0.0.0.0:{port}/jwks"},  # no loopback by its number, though it leads there
    ],
)
async def test_the_last_good_keys_hold_while_the_issuer_is_in_trouble(
    world, issuer, trouble: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await world.caller(issuer.token("one"))
    healthy = {name: getattr(issuer, name) for name in trouble}
    for name, value in trouble.items():
        port = issuer.url.rpartition(":")[2]
        setattr(issuer, name, value.replace("{port}", port) if isinstance(value, str) else value)
    issuer.add_key("two")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.now += MIN_INTERVAL_S
            assert await world.refusal(issuer.token("two")) == (503, "unavailable", False)
            await world.caller(issuer.token("one"))
        assert len(caplog.records) == 1
        for name, value in healthy.items():
            setattr(issuer, name, value)
        world.now += MIN_INTERVAL_S
        await world.caller(issuer.token("two"))
        assert len(caplog.records) == 2


async def test_an_issuer_that_was_never_reached_is_asked_again_later(world, issuer) -> None:
    issuer.status = 503
    for _ in range(3):
        assert (await world.refusal(issuer.token("one")))[:2] == (503, "unavailable")
    issuer.status = 200
    world.now += MIN_INTERVAL_S
    await world.caller(issuer.token("one"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tenant": "a", "tenant_claim": "org"}, "exactly one of tenant and tenant_claim"),
        ({}, "exactly one of tenant and tenant_claim"),
        ({"tenant": "a", "tenants": ["a"]}, "tenants has no meaning without tenant_claim"),
        ({"tenant": "a", "algorithms": ["HS256"]}, "algorithms"),
        ({"tenant": "a", "algorithms": ["none"]}, "algorithms"),
        ({"tenant": "a", "algorithms": []}, "algorithms"),
        ({"tenant": "a", "audience": []}, "audience"),
        ({"tenant": "a", "audience": ""}, "audience"),
        ({"tenant": "a", "issuer": "http://idp.example"}, "is not encrypted"),
        ({"tenant": "a", "issuer": "accounts"}, "is not a URL to fetch keys from: set jwks_url"),
        ({"tenant": "a", "jwks_url": "file:///etc/passwd"}, "is not a URL to fetch keys from"),
        ({"tenant": "a", "jwks_url": "https://[x"}, "is not a URL"),
        ({"tenant": "a", "leway_s": 3}, "did you mean 'leeway_s'"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_start(changes: dict[str, Any], complaint: str) -> None:
    section = {"issuer": "https://idp.example", "audience": "headrace", **changes}
    with pytest.raises(ConfigError, match=complaint):
        parse_config({"jwt": [section]})


def test_a_gateway_without_issuers_does_not_load_the_libraries_of_tokens() -> None:
    code = "import sys, gateway.main; print({'jwt', 'cryptography.hazmat'} & {*sys.modules})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


def test_what_can_be_meant_is_taken() -> None:
    def section(**changes: Any) -> dict[str, Any]:
        return {"issuer": "https://idp.example", "audience": ["a", "b"], "tenant": "t", **changes}

    parse_config({"jwt": [section(), section(issuer="http://localhost:1")]})
    parse_config({"jwt": [section(issuer="http://idp.example", allow_http=True)]})
    parse_config({"jwt": [section(issuer="accounts", jwks_url="https://idp.example/keys")]})
    with pytest.raises(ConfigError, match=r"names in \[\[jwt\]\] must differ"):
        parse_config({"jwt": [section(), section()]})
