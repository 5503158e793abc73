"""Tokens of an identity provider on loopback in the place of API keys, through a real gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.auth.signing_keys import MIN_INTERVAL_S
from tests.http_client import Answer, send
from tests.stack import Stack, fake_model, wait_until
from tests.token_issuer import AUDIENCE, TokenIssuer


@pytest.fixture(scope="module")
def issuer() -> Iterator[TokenIssuer]:
    with TokenIssuer() as issuer:
        issuer.add_key("one")
        yield issuer


@pytest.fixture(scope="module")
def stack(redis_url: str, issuer: TokenIssuer) -> Iterator[Stack]:
    document = {
        "models": [fake_model("a"), fake_model("b")],
        "tenants": [{"name": "acme"}, {"name": "metered", "requests_per_minute": 2}],
        "jwt": [
            {
                "issuer": issuer.url,
                "audience": AUDIENCE,
                "tenant_claim": "org",
                "models_claim": "models",
                "leeway_s": 0,
            }
        ],
    }
    with Stack(redis_url, document) as stack:
        yield stack


def complete(stack: Stack, key: str, model: str = "a") -> Answer:
    return send(
        stack.url, "POST", "/v1/completions", {"model": model, "prompt": "x", "max_tokens": 1}, key=key
    )


def token(issuer: TokenIssuer, key_id: str = "one", **claims: Any) -> str:
    return issuer.token(key_id, **{"org": "acme", "models": ["a"], **claims})


def test_a_token_does_what_a_key_does(stack, issuer) -> None:
    assert complete(stack, token(issuer)).status == 200
    assert complete(stack, stack.key("acme"), "b").status == 200
    refused = complete(stack, token(issuer), "b")
    assert (refused.status, refused.error["code"], refused.error["param"]) == (
        403,
        "permission_denied",
        "model",
    )
    listed = send(stack.url, "GET", "/v1/models", key=token(issuer)).json["data"]
    assert [model["id"] for model in listed] == ["a"]


def test_limits_of_the_tenant_hold_for_its_tokens(stack, issuer) -> None:
    statuses = [complete(stack, token(issuer, org="metered", sub=f"s{number}")).status for number in range(3)]
    assert statuses == [200, 200, 429]


@pytest.mark.parametrize(
    ("claims", "status", "message"),
    [
        ({"exp": 1}, 401, "The token has expired."),
        ({"aud": "other"}, 401, "The token is for another audience."),
        ({"org": None}, 403, "The token names no tenant in its claim 'org'."),
        ({"org": "nobody"}, 403, "The tenant of this API key is not configured."),
        (
            {"iss": "https://elsewhere.example"},
            401,
            "The issuer of the token is not one of those that are trusted.",
        ),
    ],
)
def test_a_token_that_is_not_good_enough_is_told_why(stack, issuer, claims, status, message) -> None:
    refused = complete(stack, token(issuer, **claims))
    assert (refused.status, refused.error["message"]) == (status, message)
    assert refused.error["code"] == ("invalid_api_key" if status == 401 else "permission_denied")


def test_signing_keys_are_followed_and_outlast_an_outage(stack, issuer) -> None:
    assert complete(stack, token(issuer)).status == 200
    issuer.add_key("two")
    wait_until(
        lambda: complete(stack, token(issuer, "two")).status == 200, 2 * MIN_INTERVAL_S, "the new signing key"
    )
    issuer.status = 503
    issuer.add_key("three")
    wait_until(
        lambda: complete(stack, token(issuer, "three")).status == 503, 2 * MIN_INTERVAL_S, "the outage"
    )
    for key_id in ("one", "two"):
        assert complete(stack, token(issuer, key_id, sub="new")).status == 200
    issuer.status = 200
    wait_until(
        lambda: complete(stack, token(issuer, "three")).status == 200, 2 * MIN_INTERVAL_S, "the recovery"
    )
    assert stack.log("gateway").count("cannot be fetched:") == 1
    assert stack.log("gateway").count("can be fetched again") == 1
