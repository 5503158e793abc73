"""From an HTTP request to one that may run: what every endpoint that runs a model begins and ends with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from aiohttp import web
from opentelemetry import trace
from opentelemetry.context import Context

from gateway.auth.caller import Caller
from gateway.balancer import Choice
from gateway.engine_link import EngineLink
from gateway.errors import EngineFailedError, invalid_request, no_engine, unavailable
from gateway.exchange import Exchange, exchange_of
from gateway.limits import NO_TOKENS, Demand, LimitReachedError, Reservation
from gateway.limits.dimensions import Dimensions
from gateway.openai.body import read_json
from gateway.openai.schema import ModelBody, check_body
from gateway.openai.unknown_fields import check_without_unknown, header_value
from gateway.placement import Placement
from gateway.policy import PolicySnapshot
from gateway.request_account import RequestAccount
from gateway.routing.assignment import VARIANT_HEADER, Asker, Assignment, subject_hash
from gateway.routing.fallback import FallbackChain
from gateway.services import Services
from shared.config import RouteConfig, Runner, TenantConfig, VariantConfig
from shared.telemetry import SpanAttribute, SpanName

ASSIGNED_VARIANT_HEADER = "x-headrace-assigned-variant"
SUBJECT_HEADER = "x-headrace-subject"
IGNORED_HEADER = "x-headrace-ignored"
SESSION_HEADER = "x-headrace-session"
SLOW_BODY_S = 1.0  # a request whose body took longer says once more who it is from
LONG_BODY_BYTES = 16_384  # tokenising more than this takes milliseconds: in a thread, then

BodyT = TypeVar("BodyT", bound=ModelBody)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Admitted(Generic[BodyT]):
    """A request with everything known about it but its tokens."""

    request: web.Request
    exchange: Exchange
    body: BodyT
    tenant: TenantConfig
    route: RouteConfig
    assignment: Assignment
    chain: FallbackChain  # whose turn it is if the variant fails
    variant: VariantConfig  # that is to answer
    engine: EngineLink  # one that serves the model: for its tokenizer and its card
    limits: Dimensions
    ignored_fields: tuple[str, ...] = ()
    num_loaded_bytes: int = 0  # of what the body refers to and the endpoint has fetched

    @property
    def account(self) -> RequestAccount:
        account = self.exchange.account
        assert account is not None, "who is admitted has one"
        return account

    def as_copy(self, variant: VariantConfig, engine: EngineLink, exchange: Exchange) -> Admitted[BodyT]:
        """As another variant is to answer it, too, with an account and a span of its own."""
        return replace(self, variant=variant, engine=engine, exchange=exchange)

    async def encode(self, encode: Callable[[], ResultT]) -> ResultT:
        """What tokenises the body, in a thread if that takes long."""
        if (self.request.content_length or LONG_BODY_BYTES) + self.num_loaded_bytes < LONG_BODY_BYTES:
            return encode()
        return await asyncio.to_thread(encode)

    def answer_headers(self, choice: Choice | None = None) -> dict[str, str]:
        """`choice`: of the engine; None: the gateway answers by itself."""
        headers = {
            **self.exchange.headers,
            **({IGNORED_HEADER: header_value(self.ignored_fields)} if self.ignored_fields else {}),
            VARIANT_HEADER: self.variant.variant,
            SUBJECT_HEADER: self.assignment.told_source,
            **self.chain.headers,
        }
        if self.variant.variant != self.assignment.assigned.variant:
            headers[ASSIGNED_VARIANT_HEADER] = self.assignment.assigned.variant
        if choice is not None:
            headers["x-headrace-engine"] = choice.engine_id
            headers["x-headrace-route-reason"] = choice.reason
        return headers


class Admission(Generic[BodyT]):
    """Lets the requests of one endpoint in, and keeps account of those that run."""

    def __init__(
        self,
        services: Services,
        body: type[BodyT],
        *,
        operation: str,
        runner: Runner | None,
        is_for_engine: bool = True,
    ) -> None:
        """`operation`: gen_ai.operation.name. `runner`: of the models that the endpoint is for; None: all.
        `is_for_engine`: requests that only count, show or turn tokens into text are not, and say nothing of a
        variant, however they end."""
        self._services = services
        self._body = body
        self._operation = operation
        self._runner = runner
        self._is_for_engine = is_for_engine

    async def admit(self, request: web.Request) -> Admitted[BodyT]:
        """Raises ApiError for whatever is wrong before the text is looked at."""
        services = self._services
        key = await services.authenticator.authenticate(request.headers, request.remote)
        # This request sees one policy, whatever is published meanwhile.
        exchange_of(request).policy = policy = services.policy.current
        try:
            return await self._admit(request, key, policy)
        except Exception:
            if exchange_of(request).account is None:  # who sent it is known, but not what it is of
                self._open_account_without_route(request, key)
            raise

    async def _admit(self, request: web.Request, key: Caller, policy: PolicySnapshot) -> Admitted[BodyT]:
        services = self._services
        tenant = policy.tenant(key.tenant)
        document = await read_json(request, policy.options)
        if time.monotonic() - exchange_of(request).arrived_at > SLOW_BODY_S:  # the key may be revoked by now
            key = await services.authenticator.authenticate(request.headers, request.remote)
        ignored: tuple[str, ...] = ()
        if policy.options.unknown_fields == "ignore":
            body, ignored = check_without_unknown(self.body_for(document), document)
        else:
            body = check_body(self.body_for(document), document)
        route = policy.route(body.model, tenant)
        key.check_may_use(route.name)
        assignment = services.assigner.assign(route, self._asker(request, body, key))
        self._open_account(request, body, route, key, assignment)
        if services.is_draining:
            raise unavailable("The server is shutting down.")
        chain = FallbackChain(route, assignment.variant)
        variant, engine = self._next_ready(chain, exchange_of(request))
        self._check_runner(body.model, engine)
        return Admitted(
            request,
            exchange_of(request),
            body,
            tenant,
            route,
            assignment,
            chain,
            variant,
            engine,
            services.limiter.dimensions(tenant, route.name, key.key_id, key.limits),
            ignored,
        )

    def fall_back(self, admitted: Admitted[BodyT], failure: EngineFailedError) -> Admitted[BodyT]:
        """The request as the next variant is to answer it, since this one has failed. Raises the last
        failure if there is none."""
        admitted.chain.failed.append(admitted.variant.variant)
        variant, engine = self._next_ready(admitted.chain, admitted.exchange, failure)
        return replace(admitted, variant=variant, engine=engine)

    def _next_ready(
        self, chain: FallbackChain, exchange: Exchange, failure: EngineFailedError | None = None
    ) -> tuple[VariantConfig, EngineLink]:
        """The first variant of what is left of a chain that has an engine, and one of its engines.

        Raises `failure` if there is none and that was the last one.
        """
        account = exchange.account
        assert account is not None, "who is admitted has one"
        while (variant := chain.next()) is not None:
            if engines := self._services.pool.ready(variant.model):
                if chain.failed:
                    account.fell_back(variant.variant, variant.model)
                    exchange.span.set_attribute(SpanAttribute.RESPONSE_MODEL, variant.model)
                    exchange.span.set_attribute(SpanAttribute.VARIANT, variant.variant)
                    self._services.metrics.fallbacks.labels(
                        account.route, chain.failed[-1], variant.variant
                    ).inc()
                return variant, engines[0]
            chain.failed.append(variant.variant)
            failure = no_engine(account.route)
        assert failure is not None, "a chain begins with the variant that a request is meant for"
        failure.add_headers(chain.headers)
        raise failure

    def body_for(self, document: object) -> type[BodyT]:
        """The form in which a document is to be read, where an endpoint takes several."""
        return self._body

    @contextlib.asynccontextmanager
    async def running(
        self, admitted: Admitted[BodyT], demand: Demand = NO_TOKENS
    ) -> AsyncIterator[Reservation]:
        """Holds the request's share of the limits. Raises ApiError 429 or 503.

        What it has really taken is settled on every way out, without waiting: also while being cancelled.
        """
        services, exchange, account = self._services, admitted.exchange, admitted.account
        try:
            reservation = await services.limiter.reserve(admitted.limits, demand)
        except LimitReachedError as error:
            exchange.tell_limits(error.standing_of)
            raise
        exchange.tell_limits(reservation.standings)
        services.metrics.requests_in_flight.inc()
        running = services.running.enter()
        try:
            yield reservation
            if account.failure is None:
                account.is_due = True
        except asyncio.CancelledError:
            if services.running.are_ended:  # not by the client, then: it is still there to be told
                raise unavailable("The server is shutting down.") from None
            account.was_left = True
            raise
        finally:
            charged = account.charged
            services.limiter.settle(reservation, charged.prompt_tokens, charged.completion_tokens)
            services.running.leave(running)
            services.metrics.requests_in_flight.dec()

    def placement(self, admitted: Admitted[BodyT]) -> Placement:
        services, model, account = self._services, admitted.variant.model, admitted.account

        def on_placed(choice: Choice) -> None:
            account.engine_id = choice.engine_id  # also when the request moves to another one
            services.metrics.placements.labels(model, choice.reason).inc()

        return Placement(model, services.pool, services.balancer, on_placed)

    @contextlib.contextmanager
    def copied_exchange(self, exchange: Exchange, account: RequestAccount) -> Iterator[Exchange]:
        """Of a shadow copy: in the same trace, but it may end after the request."""
        services = self._services
        span: trace.Span = trace.INVALID_SPAN
        if services.tracing.enabled:
            parent = trace.set_span_in_context(exchange.span, Context())
            span = services.tracing.tracer.start_span(SpanName.SHADOW, context=parent)
            span.set_attribute(SpanAttribute.VARIANT, account.variant)
        try:
            yield replace(exchange, span=span, arrived_at=account.arrived_at, account=account)
        finally:
            span.end()

    @contextlib.contextmanager
    def span(self, name: str, exchange: Exchange) -> Iterator[trace.Span]:
        if not self._services.tracing.enabled:
            yield trace.INVALID_SPAN
            return
        parent = trace.set_span_in_context(exchange.span, Context())
        with self._services.tracing.tracer.start_as_current_span(name, context=parent) as span:
            yield span

    def place(self, admitted: Admitted[BodyT], placement: Placement, start: Callable[[], None]) -> None:
        """Runs `start`, which chooses the engine, in a span that says which and why."""
        with self.span(SpanName.ROUTE, admitted.exchange) as span:
            start()
            assert placement.choice is not None, "start chooses or raises"
            span.set_attribute(SpanAttribute.ENGINE, placement.choice.engine_id)
            span.set_attribute(SpanAttribute.ROUTE_REASON, placement.choice.reason)

    def _asker(self, request: web.Request, body: BodyT, caller: Caller) -> Asker:
        return Asker(
            tenant=caller.tenant,
            key_id=caller.key_id,
            user=body.user,
            session=request.headers.get(SESSION_HEADER),
            wished_variant=request.headers.get(VARIANT_HEADER),
        )

    def _open_account_without_route(self, request: web.Request, caller: Caller) -> None:
        """A row for billing and for who looks for abuse. What the client named as its model is anything, and
        is not in it."""
        exchange = exchange_of(request)
        exchange.account = RequestAccount(
            request_id=exchange.request_id,
            tenant=caller.tenant,
            key_id=caller.key_id,
            operation=self._operation,
            route="",
            experiment_version=0,
            assigned_variant="",
            variant="",
            model="",
            subject_hash=0,
            arrived_at=exchange.arrived_at,
        )

    def _open_account(
        self,
        request: web.Request,
        body: BodyT,
        route: RouteConfig,
        caller: Caller,
        assignment: Assignment,
    ) -> None:
        variant = assignment.variant
        exchange = exchange_of(request)
        exchange.account = RequestAccount(
            request_id=exchange.request_id,
            tenant=caller.tenant,
            key_id=caller.key_id,
            operation=self._operation,
            route=route.name,
            experiment_version=route.version,
            assigned_variant=assignment.assigned.variant,
            variant=variant.variant,
            model=variant.model,
            subject_hash=subject_hash(route.name, route.version, assignment.subject.text),
            arrived_at=exchange.arrived_at,
            is_streamed=bool(getattr(body, "stream", False)),
            is_overridden=assignment.is_overridden,
            draw=assignment.draw if self._is_for_engine else None,
        )
        exchange.span.set_attributes(
            {
                SpanAttribute.OPERATION: self._operation,
                SpanAttribute.PROVIDER: "headrace",
                SpanAttribute.REQUEST_MODEL: body.model,
                SpanAttribute.RESPONSE_MODEL: variant.model,
                SpanAttribute.TENANT: caller.tenant,
                SpanAttribute.VARIANT: variant.variant,
            }
        )

    def _check_runner(self, name: str, engine: EngineLink) -> None:
        if self._runner in (None, engine.card.runner):
            return
        problem = (
            "makes embeddings and generates no text; it is served by /v1/embeddings"
            if engine.card.runner == "pooling"
            else "generates text and makes no embeddings"
        )
        raise invalid_request(f"The model {name!r} {problem}.", "model", "unsupported_model")
