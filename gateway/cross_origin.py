"""CORS: which web pages may call the gateway from a browser. Off unless origins are configured."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shared.config import GatewayConfig

_MAX_AGE_S = 600  # a browser remembers the answer to its question for so long
_EXPOSED_HEADERS = ("x-request-id", "request-id", "Retry-After")  # and whatever else begins with `x-`


def cross_origin_middlewares(config: GatewayConfig) -> list[Middleware]:
    """Answers a browser's question before the key is looked at: that request never has one."""
    if not config.cors_allow_origins:
        return []

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return _preflight_answer(request)
        return await handler(request)

    return [middleware]


def allow_cross_origin(app: web.Application, config: GatewayConfig) -> None:
    """Lets pages of the configured origins read answers, errors and streams included."""
    allowed = frozenset(config.cors_allow_origins)
    if not allowed:
        return

    async def on_response_prepare(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if "*" not in allowed:  # also to who may not read it, lest a shared cache mixes the two up
            response.headers.add("Vary", "Origin")
        if origin is None or not ("*" in allowed or origin in allowed):
            return
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in allowed else origin
        response.headers["Access-Control-Expose-Headers"] = _exposed(response)

    app.on_response_prepare.append(on_response_prepare)


def _preflight_answer(request: web.Request) -> web.Response:
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": str(_MAX_AGE_S),
    }
    return web.Response(status=204, headers=headers)


def _exposed(response: web.StreamResponse) -> str:
    ours = sorted({name.lower() for name in response.headers if name.lower().startswith("x-")})
    return ", ".join(dict.fromkeys([*_EXPOSED_HEADERS, *ours]))
