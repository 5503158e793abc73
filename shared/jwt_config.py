"""Issuers of JSON Web Tokens (RFC 7519), which are taken in the place of API keys."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from shared.networks import parse_address
from shared.section import Name, Section

# With a public key only: one that is shared (HS256) would let whoever can check tokens make them, too.
JwtAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
Text = Annotated[str, StringConstraints(min_length=1)]


class JwtConfig(Section):
    """One issuer, how its tokens are checked, and what they are good for."""

    issuer: Text  # as in the claim `iss`
    audience: Text | Annotated[list[Text], Field(min_length=1)]  # a token must be for one of them
    jwks_url: Text | None = None  # of its keys; None: what ISSUER/.well-known/openid-configuration says
    allow_http: bool = False  # keys may come unencrypted from other machines: who is between can forge them
    algorithms: list[JwtAlgorithm] = Field(["RS256", "ES256"], min_length=1)
    leeway_s: int = Field(30, ge=0, le=600)  # so far clocks may differ
    tenant: Name | None = None  # of all tokens; exactly one of this and the next is set
    tenant_claim: Text | None = None  # the claim that names the tenant
    tenants: list[Name] | None = None  # which it may name; None: any
    # The claim with the routes that a token is for, as a list or as words; None: all that its tenant may use.
    models_claim: Text | None = None
    jwks_lifetime_s: float = Field(300.0, ge=1)  # keys are fetched anew then, and when one is unknown

    @model_validator(mode="after")
    def _tells_the_tenant_and_where_keys_are(self) -> JwtConfig:
        if (self.tenant is None) == (self.tenant_claim is None):
            raise ValueError("exactly one of tenant and tenant_claim must be set")
        if self.tenants is not None and self.tenant_claim is None:
            raise ValueError("tenants has no meaning without tenant_claim")
        self.check_url(self.jwks_url or self.issuer)
        return self

    def check_url(self, url: str) -> None:
        """Raises ValueError for one that keys must not be fetched from."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"{url!r} is not a URL to fetch keys from: set jwks_url")
        if parts.scheme == "http" and not self.allow_http and not _is_loopback(host):
            raise ValueError(f"{url!r} is not encrypted: use https, or set allow_http")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or parse_address(host).is_loopback
    except ValueError:
        return False
