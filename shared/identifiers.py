"""Names of things that cross a process boundary; distinct types so that they cannot be mixed."""

from __future__ import annotations

import os
import secrets
import threading
from typing import NewType

RequestId = NewType("RequestId", str)
"""One sequence inside the stack. Always fresh: never taken from a client."""

EngineId = NewType("EngineId", str)
"""The place an engine fills, e.g. `smollm2-135m-0`; survives restarts."""

EngineEpoch = NewType("EngineEpoch", str)
"""One life of an engine process; a restart makes a new one."""

GatewayId = NewType("GatewayId", str)
TenantId = NewType("TenantId", str)


class _RandomHex(threading.local):
    """As secrets.token_hex, with one call of the system for many: a request needs several."""

    NUM_BYTES = 4096

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._text, self._used = "", 0

    def take(self, num_bytes: int) -> str:
        end = self._used + 2 * num_bytes
        if end > len(self._text):
            self._text, self._used, end = os.urandom(self.NUM_BYTES).hex(), 0, 2 * num_bytes
        taken, self._used = self._text[self._used : end], end
        return taken


_RANDOM_HEX = _RandomHex()
os.register_at_fork(after_in_child=_RANDOM_HEX.forget)  # else both would say the same


def random_hex(num_bytes: int) -> str:
    """Of the system's random bytes."""
    return _RANDOM_HEX.take(num_bytes)


def fresh_request_id() -> RequestId:
    return RequestId(random_hex(12))


def fresh_epoch() -> EngineEpoch:
    return EngineEpoch(secrets.token_hex(8))


def fresh_gateway_id() -> GatewayId:
    return GatewayId(f"gateway-{secrets.token_hex(6)}")
