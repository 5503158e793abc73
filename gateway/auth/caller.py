"""Whoever a request comes from, however it was found out."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import permission_denied
from shared.config import Limits
from shared.identifiers import TenantId


@dataclass(frozen=True, slots=True)
class Caller:
    """`key_id`: of an API key, or made from the subject of a token. What it says holds for one request."""

    key_id: str
    tenant: TenantId
    models: frozenset[str] | None = None  # routes that it may use; None: all of its tenant's
    limits: Limits | None = None  # its own; None: the tenant's `key_limits`

    def may_use(self, route: str) -> bool:
        return self.models is None or route in self.models

    def check_may_use(self, route: str) -> None:
        """Raises ApiError 403, in the words of a tenant that may not."""
        if not self.may_use(route):
            raise permission_denied(f"This API key may not use the model {route!r}.", "model")
