"""The life of one generation request, from the key to the last byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Generic

import msgspec
from aiohttp import web
from opentelemetry import trace
from opentelemetry.context import Context

from gateway.balancer import Choice
from gateway.engine_link import EngineLink
from gateway.errors import ApiError, unavailable
from gateway.exchange import Exchange, exchange_of
from gateway.experiment import assign, subject_of
from gateway.generation import PRIORITY_NUMBERS, Generation, GenerationPlan, Prompt, TextDelta
from gateway.limits import Reservation
from gateway.metrics import AnswerFigures
from gateway.openai.answer import AnswerIdentity, WholeChoice
from gateway.openai.api import BodyT, GenerationApi
from gateway.openai.body import read_json
from gateway.openai.event_stream import EventStream, event
from gateway.openai.sampling import sampling_of
from gateway.openai.schema import check_body
from gateway.services import Services
from shared.config import RouteConfig, TenantConfig, VariantConfig
from shared.identifiers import TenantId, fresh_request_id
from shared.redis_schema import ApiKeyRecord
from shared.telemetry import SpanAttribute, SpanName

SESSION_HEADER = "x-headrace-session"
LONG_BODY_BYTES = 16_384  # tokenising more than this takes milliseconds: in a thread, then
LAST_WORDS_TIMEOUT_S = 1.0


class GenerationEndpoint(Generic[BodyT]):
    """The handler of one endpoint, for all its requests."""

    def __init__(self, services: Services, api: GenerationApi[BodyT]) -> None:
        self._services = services
        self._api = api

    async def handle(self, request: web.Request) -> web.StreamResponse:
        services = self._services
        exchange = exchange_of(request)
        key = await services.authenticator.authenticate(request.headers)
        policy = services.policy.current  # this request sees one policy, whatever is published meanwhile
        tenant = policy.tenant(key.tenant)
        document = await read_json(request, services.config.gateway)
        body = check_body(self._api.body, document)
        route = policy.route(body.model, tenant)
        variant = self._assign(request, body, route, key)
        if services.is_draining:
            raise unavailable("The server is shutting down.")
        engines = services.pool.ready(variant.model)
        if not engines:
            raise unavailable(f"No engine is ready for the model {body.model!r}.")
        plan = await self._plan(request, body, tenant, variant, engines[0])
        reservation = await services.limiter.reserve(tenant, fresh_request_id())
        generation = Generation(
            plan,
            services.pool,
            services.balancer,
            exchange.span,
            services.config.gateway.first_token_timeout_s,
            on_placed=lambda choice: services.metrics.placements.labels(plan.model, choice.reason).inc(),
        )
        services.metrics.requests_in_flight.inc()
        running = services.running.enter()
        try:
            self._start(generation, exchange)
            answer = _Answer(self, request, body, generation, reservation, route, variant)
            return await (answer.stream() if body.stream else answer.whole())
        except asyncio.CancelledError:
            if services.running.are_ended:  # not by the client, then: it is still there to be told
                raise unavailable("The server is shutting down.") from None
            raise
        finally:  # also when cancelled: nothing here waits
            generation.close()
            services.limiter.release(reservation)
            services.running.leave(running)
            services.metrics.requests_in_flight.dec()

    @property
    def services(self) -> Services:
        return self._services

    @property
    def api(self) -> GenerationApi[BodyT]:
        return self._api

    def _assign(
        self, request: web.Request, body: BodyT, route: RouteConfig, key: ApiKeyRecord
    ) -> VariantConfig:
        subject = subject_of(
            route, user=body.user, session=request.headers.get(SESSION_HEADER), key_id=key.key_id
        )
        variant = assign(route.name, route.split, subject)
        self._services.metrics.variant_requests.labels(route.name, variant.variant).inc()
        exchange_of(request).span.set_attributes(
            {
                SpanAttribute.OPERATION: self._api.operation,
                SpanAttribute.PROVIDER: "headrace",
                SpanAttribute.REQUEST_MODEL: body.model,
                SpanAttribute.RESPONSE_MODEL: variant.model,
                SpanAttribute.TENANT: key.tenant,
                SpanAttribute.VARIANT: variant.variant,
            }
        )
        return variant

    async def _plan(
        self,
        request: web.Request,
        body: BodyT,
        tenant: TenantConfig,
        variant: VariantConfig,
        engine: EngineLink,
    ) -> GenerationPlan:
        # Tenants never share cached blocks: a hit would tell one what another one asked.
        cache_salt = f"{tenant.name}\n{body.cache_salt or ''}"
        with self._span(SpanName.TOKENIZE, exchange_of(request)) as span:
            prompts: list[Prompt]
            if (request.content_length or LONG_BODY_BYTES) < LONG_BODY_BYTES:
                prompts = self._api.encode(body, engine.tokenizer, engine.card, cache_salt)
            else:
                prompts = await asyncio.to_thread(
                    self._api.encode, body, engine.tokenizer, engine.card, cache_salt
                )
            lengths = [len(prompt.token_ids) for prompt in prompts]
            span.set_attribute(SpanAttribute.INPUT_TOKENS, sum(lengths))
        return GenerationPlan(
            model=variant.model,
            prompts=prompts,
            num_choices=body.n,
            sampling=sampling_of(
                body,
                engine.card,
                lengths,
                self._api.prompt_param,
                bad_words=engine.tokenizer.bad_word_tokens(body.bad_words),
            ),
            stop=body.stop_strings,
            include_stop_in_output=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            tenant=TenantId(tenant.name),
            priority=PRIORITY_NUMBERS[tenant.priority],
            cache_salt=cache_salt,
        )

    def _start(self, generation: Generation, exchange: Exchange) -> None:
        with self._span(SpanName.ROUTE, exchange) as span:
            generation.start()
            assert generation.choice is not None, "start chooses or raises"
            span.set_attribute(SpanAttribute.ENGINE, generation.choice.engine_id)
            span.set_attribute(SpanAttribute.ROUTE_REASON, generation.choice.reason)

    @contextlib.contextmanager
    def _span(self, name: str, exchange: Exchange) -> Iterator[trace.Span]:
        parent = trace.set_span_in_context(exchange.span, Context())
        with self._services.tracing.tracer.start_as_current_span(name, context=parent) as span:
            yield span


class _Answer(Generic[BodyT]):
    """The answer to one request, whole or streamed, and the figures taken on the way."""

    def __init__(
        self,
        endpoint: GenerationEndpoint[BodyT],
        request: web.Request,
        body: BodyT,
        generation: Generation,
        reservation: Reservation,
        route: RouteConfig,
        variant: VariantConfig,
    ) -> None:
        self._services = endpoint.services
        self._format = endpoint.api.format
        self._request = request
        self._exchange = exchange_of(request)
        self._body = body
        self._generation = generation
        self._reservation = reservation
        self._variant = variant
        self._identity = AnswerIdentity(endpoint.api.id_prefix + fresh_request_id(), route.name)
        self._figures: AnswerFigures | None = None

    async def whole(self) -> web.Response:
        choices: dict[int, WholeChoice] = {}
        async for deltas in self._generation.deltas():
            self._observe(deltas)
            for delta in deltas:
                choices.setdefault(delta.index, WholeChoice()).add(delta)
        self._observe_end()
        document = self._format.whole(
            self._identity, [choices[index] for index in sorted(choices)], self._generation.usage
        )
        return web.Response(
            body=msgspec.json.encode(document), content_type="application/json", headers=self._headers()
        )

    async def stream(self) -> web.StreamResponse:
        gateway = self._services.config.gateway
        stream = EventStream(self._request, self._headers(), gateway.write_timeout_s)
        try:
            await self._stream_deltas(stream)
            return await stream.end()
        except ApiError as error:
            if not stream.has_begun:
                raise
            return await self._last_words(stream, error)
        except (ConnectionResetError, TimeoutError):
            return stream.response  # the client is gone, or reads nothing: there is nobody to tell
        except asyncio.CancelledError:
            if self._services.running.are_ended and stream.has_begun:
                await self._last_words(stream, unavailable("The server is shutting down."))
            raise

    async def _stream_deltas(self, stream: EventStream) -> None:
        begun: set[int] = set()
        null_usage = {"usage": None} if self._body.includes_usage else {}
        async for deltas in self._generation.deltas():
            self._observe(deltas)
            chunks = []
            for delta in deltas:
                chunks += self._format.chunk(self._identity, delta, is_first=delta.index not in begun)
                begun.add(delta.index)
            if chunks:
                await stream.send(b"".join(event({**chunk, **null_usage}) for chunk in chunks))
        self._observe_end()
        if self._body.includes_usage:
            await stream.send(event(self._format.usage_chunk(self._identity, self._generation.usage)))

    async def _last_words(self, stream: EventStream, error: ApiError) -> web.StreamResponse:
        self._exchange.span.set_attribute(SpanAttribute.ERROR_TYPE, error.code or error.kind)
        self._exchange.span.set_status(trace.StatusCode.ERROR)
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                await stream.fail(error)
        return stream.response

    def _headers(self) -> dict[str, str]:
        return {
            **self._exchange.headers,
            **self._reservation.headers,
            "x-headrace-engine": self._choice.engine_id,
            "x-headrace-variant": self._variant.variant,
            "x-headrace-route-reason": self._choice.reason,
        }

    def _observe(self, deltas: list[TextDelta]) -> None:
        if self._figures is None:  # from the first token on, the request stays where it is
            model, engine_id = self._variant.model, self._choice.engine_id
            self._figures = self._services.metrics.of_answer(model, engine_id, self._exchange.arrived_at)
        self._figures.updated(delta.finish_reason for delta in deltas if delta.finish_reason is not None)

    def _observe_end(self) -> None:
        assert self._figures is not None, "an answer that has ended had at least one update"
        self._figures.ended()
        if self._services.tracing.enabled:
            usage = self._generation.usage
            self._exchange.span.set_attributes(
                {
                    SpanAttribute.RESPONSE_ID: self._identity.answer_id,
                    SpanAttribute.INPUT_TOKENS: usage.prompt_tokens,
                    SpanAttribute.OUTPUT_TOKENS: usage.completion_tokens,
                    SpanAttribute.CACHED_TOKENS: usage.cached_tokens,
                }
            )

    @property
    def _choice(self) -> Choice:
        choice = self._generation.choice
        assert choice is not None, "an answer is made only for what was started"
        return choice
