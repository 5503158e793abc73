"""What stands behind the question mark of a URL."""

from __future__ import annotations

from aiohttp import web

from gateway.errors import invalid_request


def number_in(request: web.Request, name: str, lowest: int, highest: int) -> int | None:
    """None: it is not there. Raises ApiError 400."""
    text = request.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and lowest <= int(text) <= highest):
        raise invalid_request(
            f"{name} must be a whole number from {lowest} to {highest}.", name, "invalid_value"
        )
    return int(text)


def flag_in(request: web.Request, name: str) -> bool:
    """False: it is not there. Raises ApiError 400."""
    text = request.query.get(name, "false")
    if text not in ("true", "false"):
        raise invalid_request(f"{name} must be true or false.", name, "invalid_value")
    return text == "true"
