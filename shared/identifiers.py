"""Names of things that cross a process boundary; distinct types so that they cannot be mixed."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One sequence inside the stack. Always fresh: never taken from a client."""

EngineId = NewType("EngineId", str)
"""The place an engine fills, e.g. `smollm2-135m-0`; survives restarts."""

EngineEpoch = NewType("EngineEpoch", str)
"""One life of an engine process; a restart makes a new one."""

GatewayId = NewType("GatewayId", str)
TenantId = NewType("TenantId", str)


def fresh_request_id() -> RequestId:
    return RequestId(secrets.token_hex(12))


def fresh_epoch() -> EngineEpoch:
    return EngineEpoch(secrets.token_hex(8))


def fresh_gateway_id() -> GatewayId:
    return GatewayId(f"gateway-{secrets.token_hex(6)}")
