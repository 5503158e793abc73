"""What is sent to `/admin/keys`. Moments are written in ISO 8601, with a time zone."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from gateway.openai.strict_body import Body
from shared.api_key_settings import MAX_MODELS, MAX_NAME_CHARACTERS, MAX_NETWORKS, MAX_OVERLAP_S
from shared.config import Limits
from shared.networks import Cidr
from shared.route_config import Moment
from shared.section import Name


class KeySettingsBody(Body):
    name: Annotated[str, StringConstraints(max_length=MAX_NAME_CHARACTERS)] = ""
    not_before: Moment | None = None
    not_after: Moment | None = None
    # Routes that it may use; None: all of its tenant's.
    models: Annotated[list[Name], Field(max_length=MAX_MODELS)] | None = None
    # Addresses of clients that may use it; empty: any.
    cidrs: list[Cidr] = Field(default_factory=list, max_length=MAX_NETWORKS)
    limits: Limits | None = None  # None: the tenant's `key_limits`

    def fields(self) -> dict[str, Any]:
        """Of the key's record, those that were given."""
        fields = {name: getattr(self, name) for name in _SETTINGS if name in self.model_fields_set}
        for name in ("not_before", "not_after"):
            if fields.get(name) is not None:
                fields[name] = fields[name].timestamp()
        if "cidrs" in fields:
            fields["cidrs"] = [str(cidr) for cidr in fields["cidrs"]]
        return fields


_SETTINGS = tuple(KeySettingsBody.model_fields)


class NewKeyBody(KeySettingsBody):
    tenant: Name


class RotationBody(Body):
    overlap_s: float = Field(86_400.0, ge=0, le=MAX_OVERLAP_S)  # so long the old secret goes on
