"""The HTTP application: which URL is answered by whom."""

from __future__ import annotations

from aiohttp import web

from gateway.admin.routes import admin_routes
from gateway.anthropic.endpoint import CountTokensEndpoint, MessagesEndpoint
from gateway.cross_origin import allow_cross_origin, cross_origin_middleware
from gateway.exchange import exchange_middleware
from gateway.health import Probes
from gateway.openai.api import CHAT_COMPLETIONS, COMPLETIONS
from gateway.openai.embeddings import EmbeddingsEndpoint
from gateway.openai.endpoint import GenerationEndpoint
from gateway.openai.feedback import FeedbackEndpoint
from gateway.openai.models import ModelsEndpoint
from gateway.openai.render import RenderEndpoint
from gateway.openai.responses.endpoint import ResponsesEndpoint
from gateway.openai.responses.input_tokens import InputTokensEndpoint
from gateway.openai.responses.stored import StoredResponsesEndpoint
from gateway.openai.scoring import RerankEndpoint, ScoreEndpoint
from gateway.openai.tokenization import DetokenizeEndpoint, TokenizeEndpoint
from gateway.openapi.endpoint import OpenApiEndpoint
from gateway.services import Services
from shared.config import GatewayConfig


def make_app(services: Services) -> web.Application:
    def options_in_force() -> GatewayConfig:
        return services.policy.current.options

    app = web.Application(
        middlewares=[exchange_middleware(services), cross_origin_middleware(options_in_force)],
        client_max_size=services.config.gateway.max_body_bytes,
    )
    models = ModelsEndpoint(services)
    tokenize, detokenize = TokenizeEndpoint(services), DetokenizeEndpoint(services)
    score, rerank = ScoreEndpoint(services), RerankEndpoint(services)
    stored_responses = StoredResponsesEndpoint(services)
    probes = Probes(services)
    app.add_routes(
        [
            web.post("/v1/chat/completions", GenerationEndpoint(services, CHAT_COMPLETIONS).handle),
            web.post("/v1/completions", GenerationEndpoint(services, COMPLETIONS).handle),
            web.post("/v1/embeddings", EmbeddingsEndpoint(services).handle),
            web.post("/v1/responses", ResponsesEndpoint(services).handle),
            web.post("/v1/responses/input_tokens", InputTokensEndpoint(services).handle),
            web.get("/v1/responses/{response_id}", stored_responses.get),
            web.delete("/v1/responses/{response_id}", stored_responses.delete),
            web.get("/v1/responses/{response_id}/input_items", stored_responses.input_items),
            web.post("/v1/responses/{response_id}/cancel", stored_responses.cancel),
            web.post("/v1/chat/completions/render", RenderEndpoint(services, CHAT_COMPLETIONS).handle),
            web.post("/v1/completions/render", RenderEndpoint(services, COMPLETIONS).handle),
            # vLLM's are outside of /v1, to which OpenAI's clients are bound
            *(web.post(f"{prefix}/tokenize", tokenize.handle) for prefix in ("", "/v1")),
            *(web.post(f"{prefix}/detokenize", detokenize.handle) for prefix in ("", "/v1")),
            *(web.post(f"{prefix}/score", score.handle) for prefix in ("", "/v1")),
            *(web.post(f"{prefix}/rerank", rerank.handle) for prefix in ("", "/v1", "/v2")),  # v2: Cohere's
            web.post("/v1/messages", MessagesEndpoint(services).handle),
            web.post("/v1/messages/count_tokens", CountTokensEndpoint(services).handle),
            web.post("/v1/feedback", FeedbackEndpoint(services).handle),
            web.get("/v1/models", models.list),
            web.get("/v1/models/{name:(?s:.+)}", models.get),  # names may hold slashes
            web.get("/openapi.json", OpenApiEndpoint(services).handle),
            web.get("/livez", probes.livez),
            web.get("/readyz", probes.readyz),
            web.get("/health", probes.health),
            web.get("/metrics", probes.metrics),
            *admin_routes(services),
        ]
    )
    allow_cross_origin(app, options_in_force)
    return app
