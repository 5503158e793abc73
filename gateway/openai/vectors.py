"""From the inputs of an admitted request to the vectors of an embedding model, for who answers with them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from aiohttp import web

from gateway.embedding import Embedding, EmbeddingPlan
from gateway.engine_link import EngineLink
from gateway.errors import context_length_exceeded, invalid_request
from gateway.generation import Usage
from gateway.limits import Demand
from gateway.openai.admission import Admission, Admitted
from gateway.openai.demand import check_prompt_length
from gateway.openai.embeddings_body import VectorsBody
from gateway.priority import class_of
from gateway.request_account import RequestAccount
from gateway.routing.shadow import SHADOW_CLASS, SHADOW_TENANT
from gateway.services import Services
from shared.config import VariantConfig
from shared.embedding_limits import dim_of
from shared.identifiers import TenantId
from shared.messages import ModelCard
from shared.telemetry import SpanAttribute, SpanName
from shared.tokenizer import Tokenizer

BodyT = TypeVar("BodyT", bound=VectorsBody)


class Inputs(Protocol):
    """What is to be embedded."""

    @property
    def inputs(self) -> Sequence[str] | Sequence[list[int]]: ...

    def param_of(self, index: int) -> str:
        """How the client would name one of them."""


class Vectors(Generic[BodyT]):
    """Of one endpoint, for all its requests."""

    def __init__(self, services: Services, body: type[BodyT], *, operation: str) -> None:
        self._services = services
        self._admission = Admission(services, body, operation=operation, runner="pooling")

    async def admit(self, request: web.Request) -> Admitted[BodyT]:
        return await self._admission.admit(request)

    async def answer(
        self,
        admitted: Admitted[BodyT],
        inputs: Inputs,
        write: Callable[[Sequence[memoryview], int], Awaitable[bytes]],
        dimensions: int | None = None,
    ) -> web.Response:
        """Embeds the inputs within the tenant's limits; `write` makes the JSON of the answer from their
        vectors and the number of their tokens. Raises ApiError 400 that names the first input that cannot be
        embedded."""
        plan = await self._plan(admitted, inputs, dimensions)

        async def copy(variant: VariantConfig, engine: EngineLink, account: RequestAccount) -> None:
            with self._admission.copied_exchange(admitted.exchange, account) as exchange:
                copied = admitted.as_copy(variant, engine, exchange)
                copied_plan = await self._plan(copied, inputs, dimensions)
                copied_plan = replace(copied_plan, tenant=SHADOW_TENANT, priority=SHADOW_CLASS)
                async with self._embedding(copied, copied_plan) as embedding:
                    await embedding.vectors()

        async with self._admission.running(admitted, Demand(input_tokens=plan.num_tokens)):
            async with self._embedding(admitted, plan) as embedding:
                self._services.shadows.offer(
                    admitted.route, admitted.account, copy, is_draining=self._services.is_draining
                )
                vectors = await embedding.vectors()
            document = await write(vectors, plan.num_tokens)
            choice = embedding.choice
            assert choice is not None, "who has answered was chosen"
            self._services.metrics.embedded(
                admitted.variant.model, choice.engine_id, admitted.exchange.arrived_at
            )
            return web.Response(
                body=document,
                content_type="application/json",
                headers=admitted.answer_headers(choice),
            )

    @contextlib.asynccontextmanager
    async def _embedding(self, admitted: Admitted[BodyT], plan: EmbeddingPlan) -> AsyncIterator[Embedding]:
        """Has been placed; its vectors are to be waited for before this is left."""
        placement = self._admission.placement(admitted)
        timeout_s = admitted.exchange.options.first_token_timeout_s
        embedding = Embedding(plan, placement, admitted.exchange.span, timeout_s)
        account = admitted.account
        try:
            self._admission.place(admitted, placement, embedding.start)
            yield embedding
            account.first_token_at = account.last_token_at = time.monotonic()
        finally:  # also when cancelled: it does not wait
            embedding.close()
            account.usage = Usage(plan.num_tokens, 0, 0)

    async def _plan(self, admitted: Admitted[BodyT], inputs: Inputs, dimensions: int | None) -> EmbeddingPlan:
        card, tenant = admitted.engine.card, admitted.tenant
        priority = class_of(tenant, admitted.body.priority)
        dim = dim_of(dimensions, card)
        tokenizer = admitted.engine.tokenizer
        with self._admission.span(SpanName.TOKENIZE, admitted.exchange) as span:
            token_id_lists = await admitted.encode(lambda: _encode(inputs, tokenizer, card))
            plan = EmbeddingPlan(
                token_id_lists,
                dim,
                shortens=dim < card.embedding_dim,
                tenant=TenantId(tenant.name),
                priority=priority,
            )
            span.set_attribute(SpanAttribute.INPUT_TOKENS, plan.num_tokens)
        last = len(token_id_lists) - 1
        check_prompt_length([plan.num_tokens], admitted.limits, inputs.param_of(last))
        admitted.exchange.span.set_attribute(SpanAttribute.INPUT_TOKENS, plan.num_tokens)
        return plan


def _encode(given: Inputs, tokenizer: Tokenizer, card: ModelCard) -> list[list[int]]:
    """Tokens of every input. Raises ApiError 400 that names the first one that cannot be embedded."""
    inputs = given.inputs
    for index, one in enumerate(inputs):
        if isinstance(one, str):
            _refuse_beyond(tokenizer.min_num_tokens(len(one)), given.param_of(index), card)
    token_id_lists = [
        *tokenizer.encode_whole([one for one in inputs if isinstance(one, str)]),
        *(one for one in inputs if not isinstance(one, str)),
    ]
    for index, token_ids in enumerate(token_id_lists):
        param = given.param_of(index)
        _refuse_beyond(len(token_ids), param, card)
        if not token_ids:
            raise invalid_request("The text has no tokens.", param, "invalid_value")
        if max(token_ids) >= card.vocab_size:
            raise invalid_request(f"Token ids must be below {card.vocab_size}.", param, "invalid_value")
    return token_id_lists


def _refuse_beyond(num_tokens: int, param: str, card: ModelCard) -> None:
    if num_tokens > card.max_model_len:
        raise context_length_exceeded(
            f"This model's maximum input length is {card.max_model_len} tokens, but this text has "
            f"at least {num_tokens}.",
            param,
        )
