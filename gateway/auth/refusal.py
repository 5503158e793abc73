"""Why somebody was not let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.errors import ApiError

Reason = Literal[  # label of headrace_auth_failures_total
    "missing", "malformed", "unknown", "revoked", "expired", "not_yet_valid", "address", "bad_token",
    "no_tenant", "throttled", "unreadable", "unavailable",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    error: ApiError  # what the client is told
    is_guess: bool = False  # whoever has had nothing that was ever valid
