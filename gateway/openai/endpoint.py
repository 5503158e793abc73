"""The life of one generation request, from the key to the last byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar, cast

import msgspec
from aiohttp import web
from opentelemetry import trace

from gateway import long_work
from gateway.balancer import Choice
from gateway.engine_link import EngineLink
from gateway.errors import ApiError, EngineFailedError, internal_error, no_engine, unavailable
from gateway.generation import Generation, GenerationPlan, Prompt
from gateway.limits import Reservation
from gateway.metrics import AnswerFigures
from gateway.openai.admission import Admission, Admitted
from gateway.openai.answer import AnswerIdentity, WholeChoice
from gateway.openai.api import BodyT, GenerationApi, WishT
from gateway.openai.attempt import Attempt
from gateway.openai.best_of import best_choices
from gateway.openai.demand import check_prompt_length, demand_of
from gateway.openai.event_stream import EventStream
from gateway.openai.sampling import sampling_of
from gateway.openai.turn import Speaker, TurnPlan, TurnReader
from gateway.openai.variant_fields import as_variant_asks
from gateway.placement import Placement
from gateway.priority import class_of
from gateway.request_account import CLIENT_LEFT, RequestAccount
from gateway.routing.shadow import SHADOW_CLASS, SHADOW_TENANT
from gateway.services import Services
from gateway.text_delta import TextDelta
from shared.config import VariantConfig
from shared.errors import UserError
from shared.identifiers import TenantId, fresh_request_id
from shared.telemetry import SpanAttribute, SpanName

logger = logging.getLogger(__name__)

LAST_WORDS_TIMEOUT_S = 1.0

ResultT = TypeVar("ResultT")


class GenerationEndpoint(Generic[BodyT, WishT]):
    """The handler of one endpoint, for all its requests."""

    _is_for_engine = True  # False: of one that only tells what would be run

    def __init__(self, services: Services, api: GenerationApi[BodyT, WishT]) -> None:
        self._services = services
        self._models = {model.name: model for model in services.config.models}
        self._api = api
        self._admission = Admission(
            services,
            api.body,
            operation=api.operation,
            runner="generate",
            is_for_engine=self._is_for_engine,
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        admitted = await self._admission.admit(request)
        return await self._answer(await self._first_attempt(admitted, await self._wish(admitted)))

    async def _answer(self, attempt: Attempt[BodyT, WishT]) -> web.StreamResponse:
        is_streamed = attempt.admitted.body.stream
        return await self._generate(
            attempt, lambda answer: answer.stream() if is_streamed else answer.whole()
        )

    async def _generate(
        self,
        attempt: Attempt[BodyT, WishT],
        tell: Callable[[Answer[BodyT, WishT]], Awaitable[ResultT]],
    ) -> ResultT:
        """Runs a request within its tenant's limits. `tell` hands the answer on; if an engine fails before
        any of it was told, once more with that of the next variant."""
        has_shadow = False
        async with self._admission.running(attempt.admitted, demand_of(attempt.plan)) as reservation:
            while True:
                try:
                    async with self._generating(attempt, reservation) as answer:
                        if not has_shadow:
                            has_shadow = True
                            self._offer_copy(attempt)
                        return await tell(answer)
                except EngineFailedError as failure:
                    attempt = await self._next_attempt(attempt.admitted, attempt.asked, failure)

    @contextlib.asynccontextmanager
    async def _generating(
        self, attempt: Attempt[BodyT, WishT], reservation: Reservation
    ) -> AsyncIterator[Answer[BodyT, WishT]]:
        """The answer of one variant, which runs until this is left."""
        admitted = attempt.admitted
        placement = self._admission.placement(admitted)
        generation = self._generation(attempt, attempt.plan, placement)
        reservation.output_so_far = lambda: generation.usage.completion_tokens
        try:
            self._admission.place(admitted, placement, generation.start)
            yield self._make_answer(attempt, generation)
        finally:  # also when cancelled: it does not wait
            generation.close()
            admitted.account.usage = generation.usage

    async def _first_attempt(self, admitted: Admitted[BodyT], asked: WishT) -> Attempt[BodyT, WishT]:
        """By the variant that the request is meant for; if that has no engine, by the next that can."""
        try:
            return await self._attempt(admitted, asked)
        except (ApiError, UserError):
            if not admitted.chain.failed:
                raise
            return await self._next_attempt(admitted, asked, no_engine(admitted.route.name))

    async def _attempt(
        self, admitted: Admitted[BodyT], asked: WishT, known: Attempt[BodyT, WishT] | None = None
    ) -> Attempt[BodyT, WishT]:
        """`known`: of another variant, whose tokens may be the same."""
        wish = as_variant_asks(asked, admitted.variant)
        prompts = known.plan.prompts if known is not None and known.reads_like(admitted) else None
        turn, plan = await self._plan(admitted, wish, self._speaker(admitted), prompts)
        return Attempt(admitted, asked, wish, turn, plan)

    async def _next_attempt(
        self, admitted: Admitted[BodyT], asked: WishT, failure: EngineFailedError
    ) -> Attempt[BodyT, WishT]:
        """By the next variant that can. Raises the failure if there is none."""
        while True:
            admitted = self._admission.fall_back(admitted, failure)
            try:
                return await self._attempt(admitted, asked)
            except (ApiError, UserError) as error:
                # The variant that it was meant for would have taken it, so the client is not to be blamed.
                logger.warning(
                    "variant %s of %s cannot stand in for another: %s",
                    admitted.variant.variant,
                    admitted.route.name,
                    error,
                )

    def _offer_copy(self, attempt: Attempt[BodyT, WishT]) -> None:
        admitted = attempt.admitted
        if admitted.route.shadow is None:
            return

        async def copy(variant: VariantConfig, engine: EngineLink, account: RequestAccount) -> None:
            with self._admission.copied_exchange(admitted.exchange, account) as exchange:
                await self._run_copy(attempt, admitted.as_copy(variant, engine, exchange))

        self._services.shadows.offer(
            admitted.route, admitted.account, copy, is_draining=self._services.is_draining
        )

    async def _run_copy(self, original: Attempt[BodyT, WishT], admitted: Admitted[BodyT]) -> None:
        """What a shadow variant makes of a request, thrown away as it comes."""
        copy = await self._attempt(admitted, original.asked, original)
        plan = replace(copy.plan, tenant=SHADOW_TENANT, priority=SHADOW_CLASS)
        placement = self._admission.placement(admitted)
        generation = self._generation(copy, plan, placement)
        try:
            self._admission.place(admitted, placement, generation.start)
            async for deltas in generation.deltas():
                admitted.account.generated(deltas)
        finally:
            generation.close()
            admitted.account.usage = generation.usage

    def _generation(
        self, attempt: Attempt[BodyT, WishT], plan: GenerationPlan, placement: Placement
    ) -> Generation:
        exchange = attempt.admitted.exchange
        return Generation(plan, placement, exchange.span, exchange.options.first_token_timeout_s)

    def _speaker(self, admitted: Admitted[BodyT]) -> Speaker:
        engine = admitted.engine
        return Speaker(engine.tokenizer, engine.card, self._models.get(admitted.variant.model))

    async def _wish(self, admitted: Admitted[BodyT]) -> WishT:
        """What the body asks of a model. Endpoints whose bodies are not OpenAI's completions translate it."""
        return cast("WishT", admitted.body)

    def _form_param(self, body: WishT) -> str:
        """The field in which a client asks for a form of the output."""
        return "structured_outputs" if body.structured_outputs is not None else "response_format"

    def _make_answer(self, attempt: Attempt[BodyT, WishT], generation: Generation) -> Answer[BodyT, WishT]:
        return Answer(self._services, self._api, attempt, generation)

    async def _plan(
        self,
        admitted: Admitted[BodyT],
        body: WishT,
        speaker: Speaker,
        prompts: Sequence[Prompt] | None = None,
    ) -> tuple[TurnPlan, GenerationPlan]:
        """`prompts`: the tokens, if they are known already."""
        engine, tenant = admitted.engine, admitted.tenant
        priority = class_of(tenant, body.priority)
        # Tenants never share cached blocks: a hit would tell one what another one asked.
        cache_salt = f"{tenant.name}\n{body.cache_salt or ''}"
        with self._admission.span(SpanName.TOKENIZE, admitted.exchange) as span:
            if prompts is None:
                prompts = await admitted.encode(lambda: self._api.encode(body, speaker, cache_salt))
            lengths = [len(prompt.token_ids) for prompt in prompts]
            span.set_attribute(SpanAttribute.INPUT_TOKENS, sum(lengths))
        check_prompt_length(lengths, admitted.limits, self._api.prompt_param)
        turn = self._api.plan_turn(body, speaker, prompts)
        return turn, GenerationPlan(
            model=admitted.variant.model,
            prompts=prompts,
            num_choices=body.num_candidates,
            sampling=sampling_of(
                body,
                engine.card,
                lengths,
                self._api.prompt_param,
                form=turn.form,
                bad_words=engine.tokenizer.bad_word_tokens(body.bad_words),
                default_max_tokens=admitted.variant.sampling.max_tokens,
                bound=admitted.limits.max_output,
            ),
            stop=body.stop_strings,
            include_stop_in_output=body.include_stop_str_in_output,
            skip_special_tokens=turn.skip_special_tokens,
            kept_special_tokens=turn.kept_special_tokens,
            tenant=TenantId(tenant.name),
            priority=priority,
            cache_salt=cache_salt,
            tells_logprobs=body.num_logprobs is not None,
            num_prompt_logprobs=body.prompt_logprobs,
            form_param=turn.form_param or self._form_param(body),
            tells_prompt_token_ids=body.return_token_ids,
            keeps_output=body.max_output_tokens != 0,
        )


class Answer(Generic[BodyT, WishT]):
    """The answer to one request, whole or streamed, and the figures taken on the way."""

    def __init__(
        self,
        services: Services,
        api: GenerationApi[BodyT, WishT],
        attempt: Attempt[BodyT, WishT],
        generation: Generation,
    ) -> None:
        admitted = attempt.admitted
        self._services = services
        self._turn = attempt.turn
        self._readers: dict[int, TurnReader] = {}
        self._admitted = admitted
        self._wish = attempt.wish
        self._exchange = admitted.exchange
        self._generation = generation
        self._identity = AnswerIdentity(
            api.id_prefix + fresh_request_id(), admitted.route.name, admitted.engine.fingerprint
        )
        self._account = admitted.account
        self._account.response_id = self._identity.answer_id
        self._format = api.make_format(admitted.body, self._identity)
        self._figures: AnswerFigures | None = None

    async def whole(self) -> web.Response:
        choices: dict[int, WholeChoice] = {}
        async for deltas in self._deltas():
            for delta in deltas:
                choices.setdefault(delta.index, WholeChoice()).add(delta)
        self._observe_end()
        body = self._wish
        best = best_choices(
            [choices[index] for index in sorted(choices)], num_candidates=body.num_candidates, n=body.n
        )
        usage = self._generation.usage
        num_scored = sum(len(choice.logprobs) + len(choice.prompt_logprobs or ()) for choice in best)
        document = await long_work.do(
            lambda: msgspec.json.encode(self._format.whole(best, usage)),
            is_long=num_scored > long_work.MANY_SCORED_TOKENS,
        )
        return web.Response(body=document, content_type="application/json", headers=self._headers())

    async def stream(self) -> web.StreamResponse:
        options = self._exchange.options
        stream = EventStream(
            self._admitted.request,
            self._headers(),
            write_timeout_s=options.write_timeout_s,
            keep_alive_s=options.stream_keep_alive_s,
        )
        try:
            async with stream.kept_alive():
                async for deltas in self._deltas():
                    if events := await self._events(deltas):
                        await stream.send(events)
                        if not self._account.is_due:
                            self._account.is_due = True
                            self._observe_first_event()
            self._observe_end()
            return await stream.end(await self._closing_events())
        except ApiError as error:
            if not stream.has_begun:
                raise
            return await self._last_words(stream, error)
        except (ConnectionResetError, TimeoutError):
            self._account.failure = (CLIENT_LEFT, None)
            return stream.response  # the client is gone, or reads nothing: there is nobody to tell
        except Exception:  # a fault of ours; behind what has been sent a second answer would be garbage
            if not stream.has_begun:
                raise
            logger.exception("the stream of request %s failed", self._exchange.request_id)
            return await self._last_words(stream, internal_error())
        except asyncio.CancelledError:
            if self._services.running.are_ended and stream.has_begun:
                await self._last_words(stream, unavailable("The server is shutting down."))
            raise

    async def _closing_events(self) -> bytes:
        return self._format.closing_events(self._generation.usage)

    async def _events(self, deltas: list[TextDelta]) -> bytes:
        for delta in deltas:
            if len(delta.logprobs) > long_work.MANY_SCORED_TOKENS:
                return await asyncio.to_thread(self._format.events, deltas)
        return self._format.events(deltas)

    async def _deltas(self) -> AsyncIterator[list[TextDelta]]:
        """As they come, each part of them in its place."""
        make_reader = self._turn.make_reader
        async for deltas in self._generation.deltas():
            self._observe(deltas)
            if make_reader is None:
                yield deltas
            else:
                yield [
                    part for delta in deltas for part in self._reader(delta.index, make_reader).read(delta)
                ]

    def _reader(self, index: int, make_reader: Callable[[], TurnReader]) -> TurnReader:
        if index not in self._readers:
            self._readers[index] = make_reader()
        return self._readers[index]

    async def _last_words(self, stream: EventStream, error: ApiError) -> web.StreamResponse:
        self._account.failure = (error.status, error.code)
        self._exchange.span.set_attribute(SpanAttribute.ERROR_TYPE, error.code or error.kind)
        self._exchange.span.set_status(trace.StatusCode.ERROR)
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                await stream.end(self._format.failure_events(error))
        return stream.response

    def _headers(self) -> dict[str, str]:
        return self._admitted.answer_headers(self._choice)

    def _observe(self, deltas: list[TextDelta]) -> None:
        if self._figures is None:  # from the first token on, the request stays where it is
            model, engine_id = self._admitted.variant.model, self._choice.engine_id
            self._figures = self._services.metrics.of_answer(model, engine_id, self._exchange.arrived_at)
            self._account.first_token_at = self._generation.first_update_at
        reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
        self._account.last_token_at = self._figures.updated(reasons)
        self._account.finish_reasons += reasons

    def _observe_first_event(self) -> None:
        delay_s = time.monotonic() - self._generation.first_update_at
        self._services.metrics.first_event_delay.observe(delay_s)

    def _observe_end(self) -> None:
        assert self._figures is not None, "an answer that has ended had at least one update"
        self._figures.ended()
        if self._exchange.span.is_recording():  # what runs in the background outlives its request's
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
