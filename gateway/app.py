"""The HTTP application: which URL is answered by whom."""

from __future__ import annotations

from aiohttp import web

from gateway.admin import AdminEndpoint
from gateway.cross_origin import allow_cross_origin, cross_origin_middlewares
from gateway.exchange import exchange_middleware
from gateway.health import Probes
from gateway.openai.api import CHAT_COMPLETIONS, COMPLETIONS
from gateway.openai.embeddings import EmbeddingsEndpoint
from gateway.openai.endpoint import GenerationEndpoint
from gateway.openai.models import ModelsEndpoint
from gateway.services import Services


def make_app(services: Services) -> web.Application:
    app = web.Application(
        middlewares=[exchange_middleware(services), *cross_origin_middlewares(services.config.gateway)],
        client_max_size=services.config.gateway.max_body_bytes,
    )
    models = ModelsEndpoint(services)
    admin = AdminEndpoint(services)
    probes = Probes(services)
    app.add_routes(
        [
            web.post("/v1/chat/completions", GenerationEndpoint(services, CHAT_COMPLETIONS).handle),
            web.post("/v1/completions", GenerationEndpoint(services, COMPLETIONS).handle),
            web.post("/v1/embeddings", EmbeddingsEndpoint(services).handle),
            web.get("/v1/models", models.list),
            web.get("/v1/models/{name:.+}", models.get),  # names may hold slashes
            web.get("/livez", probes.livez),
            web.get("/readyz", probes.readyz),
            web.get("/health", probes.health),
            web.get("/metrics", probes.metrics),
            web.get("/admin/status", admin.status),
            web.post("/admin/prefix-cache/reset", admin.reset_prefix_cache),
        ]
    )
    allow_cross_origin(app, services.config.gateway)
    return app
