"""How a row says what it expects."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

MAX_SHOWN = 160


class CheckFailed(Exception):  # noqa: N818 - an outcome rather than an error of ours
    """The server does something else than it should; the message says what."""


class NotApplicable(Exception):  # noqa: N818 - an outcome rather than an error of ours
    """The server does not claim to have what a row is about, or the row cannot tell; the message says why."""


def check(holds: object, reason: str) -> None:
    if not holds:
        raise CheckFailed(reason)


def check_equal(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise CheckFailed(f"{what} is {shown(found)}, not {shown(expected)}")


def check_in(found: Any, expected: Container[Any], what: str) -> None:
    if found not in expected:
        raise CheckFailed(f"{what} is {shown(found)}, not one of {shown(expected)}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
