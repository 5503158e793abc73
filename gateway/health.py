"""Probes. Liveness is about this process alone; health is about progress."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gateway.services import Services


class Probes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def livez(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 when every configured model with engines has one that takes requests."""
        missing = [
            model.name
            for model in self._services.config.models
            if model.num_engines > 0 and not self._services.pool.ready(model.name)
        ]
        is_ready = not missing and not self._services.is_draining
        return _json(is_ready, {"ready": is_ready, "models_without_engine": missing})

    async def health(self, _request: web.Request) -> web.Response:
        """200 when some engine takes requests and none that has work stands still."""
        ready = [
            link for model in self._services.config.models for link in self._services.pool.ready(model.name)
        ]
        stalled = [link.engine_id for link in ready if link.is_stalled]
        is_healthy = len(ready) > len(stalled) and not stalled
        return _json(
            is_healthy,
            {"healthy": is_healthy, "engines": [link.engine_id for link in ready], "stalled": stalled},
        )

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._services.metrics.exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _json(is_good: bool, document: dict[str, Any]) -> web.Response:
    return web.Response(
        status=200 if is_good else 503, body=msgspec.json.encode(document), content_type="application/json"
    )
