"""From an HTTP request to one that may run: what every endpoint that runs a model begins and ends with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiohttp import web
from opentelemetry import trace
from opentelemetry.context import Context

from gateway.balancer import Choice
from gateway.engine_link import EngineLink
from gateway.errors import invalid_request, unavailable
from gateway.exchange import Exchange, exchange_of
from gateway.experiment import assign, subject_hash, subject_of
from gateway.limits import Reservation
from gateway.openai.body import read_json
from gateway.openai.schema import ModelBody, check_body
from gateway.openai.unknown_fields import check_without_unknown, header_value
from gateway.placement import Placement
from gateway.request_account import RequestAccount
from gateway.services import Services
from shared.config import RouteConfig, Runner, TenantConfig, VariantConfig
from shared.identifiers import fresh_request_id
from shared.redis_schema import ApiKeyRecord
from shared.telemetry import SpanAttribute, SpanName

IGNORED_HEADER = "x-headrace-ignored"
SESSION_HEADER = "x-headrace-session"
LONG_BODY_BYTES = 16_384  # tokenising more than this takes milliseconds: in a thread, then

BodyT = TypeVar("BodyT", bound=ModelBody)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Admitted(Generic[BodyT]):
    """A request with everything known about it but its tokens."""

    request: web.Request
    body: BodyT
    tenant: TenantConfig
    route: RouteConfig
    variant: VariantConfig
    engine: EngineLink  # one that serves the model: for its tokenizer and its card
    ignored_fields: tuple[str, ...] = ()
    num_loaded_bytes: int = 0  # of what the body refers to and the endpoint has fetched

    @property
    def exchange(self) -> Exchange:
        return exchange_of(self.request)

    @property
    def account(self) -> RequestAccount:
        account = self.exchange.account
        assert account is not None, "who is admitted has one"
        return account

    async def encode(self, encode: Callable[[], ResultT]) -> ResultT:
        """What tokenises the body, in a thread if that takes long."""
        if (self.request.content_length or LONG_BODY_BYTES) + self.num_loaded_bytes < LONG_BODY_BYTES:
            return encode()
        return await asyncio.to_thread(encode)

    def answer_headers(self, reservation: Reservation, choice: Choice | None = None) -> dict[str, str]:
        """`choice`: of the engine; None: the gateway answers by itself."""
        headers = {
            **self.exchange.headers,
            **reservation.headers,
            **({IGNORED_HEADER: header_value(self.ignored_fields)} if self.ignored_fields else {}),
            "x-headrace-variant": self.variant.variant,
        }
        if choice is not None:
            headers["x-headrace-engine"] = choice.engine_id
            headers["x-headrace-route-reason"] = choice.reason
        return headers


class Admission(Generic[BodyT]):
    """Lets the requests of one endpoint in, and keeps account of those that run."""

    def __init__(
        self, services: Services, body: type[BodyT], *, operation: str, runner: Runner | None
    ) -> None:
        """`operation`: gen_ai.operation.name. `runner`: of the models that the endpoint is for; None: all."""
        self._services = services
        self._body = body
        self._operation = operation
        self._runner = runner

    async def admit(self, request: web.Request) -> Admitted[BodyT]:
        """Raises ApiError for whatever is wrong before the text is looked at."""
        services = self._services
        key = await services.authenticator.authenticate(request.headers)
        policy = services.policy.current  # this request sees one policy, whatever is published meanwhile
        tenant = policy.tenant(key.tenant)
        document = await read_json(request, services.config.gateway)
        ignored: tuple[str, ...] = ()
        if services.config.gateway.unknown_fields == "ignore":
            body, ignored = check_without_unknown(self.body_for(document), document)
        else:
            body = check_body(self.body_for(document), document)
        route = policy.route(body.model, tenant)
        variant = self._assign(request, body, route, key)
        if services.is_draining:
            raise unavailable("The server is shutting down.")
        engines = services.pool.ready(variant.model)
        if not engines:
            raise unavailable(f"No engine is ready for the model {body.model!r}.")
        self._check_runner(body.model, engines[0])
        return Admitted(request, body, tenant, route, variant, engines[0], ignored)

    def body_for(self, document: object) -> type[BodyT]:
        """The form in which a document is to be read, where an endpoint takes several."""
        return self._body

    @contextlib.asynccontextmanager
    async def running(self, admitted: Admitted[BodyT]) -> AsyncIterator[Reservation]:
        """Holds the request's share of the limits. Raises ApiError 429 or 503.

        What is held is given back on every way out, without waiting: also while being cancelled.
        """
        services = self._services
        reservation = await services.limiter.reserve(admitted.tenant, fresh_request_id())
        services.metrics.requests_in_flight.inc()
        running = services.running.enter()
        try:
            yield reservation
        except asyncio.CancelledError:
            if services.running.are_ended:  # not by the client, then: it is still there to be told
                raise unavailable("The server is shutting down.") from None
            raise
        finally:
            services.limiter.release(reservation)
            services.running.leave(running)
            services.metrics.requests_in_flight.dec()

    def placement(self, admitted: Admitted[BodyT]) -> Placement:
        services, model = self._services, admitted.variant.model
        return Placement(
            model,
            services.pool,
            services.balancer,
            on_placed=lambda choice: services.metrics.placements.labels(model, choice.reason).inc(),
        )

    @contextlib.contextmanager
    def span(self, name: str, exchange: Exchange) -> Iterator[trace.Span]:
        parent = trace.set_span_in_context(exchange.span, Context())
        with self._services.tracing.tracer.start_as_current_span(name, context=parent) as span:
            yield span

    def place(self, admitted: Admitted[BodyT], placement: Placement, start: Callable[[], None]) -> None:
        """Runs `start`, which chooses the engine, in a span that says which and why."""
        with self.span(SpanName.ROUTE, admitted.exchange) as span:
            start()
            assert placement.choice is not None, "start chooses or raises"
            admitted.account.engine_id = placement.choice.engine_id
            span.set_attribute(SpanAttribute.ENGINE, placement.choice.engine_id)
            span.set_attribute(SpanAttribute.ROUTE_REASON, placement.choice.reason)

    def _assign(
        self, request: web.Request, body: BodyT, route: RouteConfig, key: ApiKeyRecord
    ) -> VariantConfig:
        subject = subject_of(
            route, user=body.user, session=request.headers.get(SESSION_HEADER), key_id=key.key_id
        )
        variant = assign(route.name, route.version, route.split, subject)
        self._services.metrics.variant_requests.labels(route.name, variant.variant).inc()
        exchange = exchange_of(request)
        exchange.account = RequestAccount(
            request_id=exchange.request_id,
            tenant=key.tenant,
            key_id=key.key_id,
            operation=self._operation,
            route=route.name,
            experiment_version=route.version,
            assigned_variant=variant.variant,
            variant=variant.variant,
            model=variant.model,
            subject_hash=subject_hash(route.name, route.version, subject),
            arrived_at=exchange.arrived_at,
            is_streamed=bool(getattr(body, "stream", False)),
        )
        exchange.span.set_attributes(
            {
                SpanAttribute.OPERATION: self._operation,
                SpanAttribute.PROVIDER: "headrace",
                SpanAttribute.REQUEST_MODEL: body.model,
                SpanAttribute.RESPONSE_MODEL: variant.model,
                SpanAttribute.TENANT: key.tenant,
                SpanAttribute.VARIANT: variant.variant,
            }
        )
        return variant

    def _check_runner(self, name: str, engine: EngineLink) -> None:
        if self._runner in (None, engine.card.runner):
            return
        problem = (
            "makes embeddings and generates no text; it is served by /v1/embeddings"
            if engine.card.runner == "pooling"
            else "generates text and makes no embeddings"
        )
        raise invalid_request(f"The model {name!r} {problem}.", "model", "unsupported_model")
