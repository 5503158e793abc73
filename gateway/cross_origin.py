"""CORS: which web pages may call the gateway from a browser. Off unless origins are configured."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shared.config import GatewayConfig

_MAX_AGE_S = 600  # a browser remembers the answer to its question for so long
_EXPOSED_HEADERS = ("x-request-id", "request-id", "Retry-After")  # and whatever else begins with `x-`


Options = Callable[[], GatewayConfig]  # those in force


def cross_origin_middleware(options: Options) -> Middleware:
    """Answers a browser's question before the key is looked at: that request never has one."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_question = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if is_question and options().cors_allow_origins:
            return _preflight_answer(request)
        return await handler(request)

    return middleware


def allow_cross_origin(app: web.Application, options: Options) -> None:
    """Lets pages of the configured origins read answers, errors and streams included."""

    async def on_response_prepare(request: web.Request, response: web.StreamResponse) -> None:
        allowed = options().cors_allow_origins
        if not allowed:
            return
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
