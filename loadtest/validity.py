"""One condition that a measurement must meet to mean what it says."""

from __future__ import annotations

import msgspec


class ValidityCheck(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` says in one sentence what was found, whether it passed or not. Units are in the name.

    `value` is None where it could not be told; such a check passes, and its reason says so.
    """

    check: str
    passed: bool
    value: float | None
    limit: float | None
    reason: str
