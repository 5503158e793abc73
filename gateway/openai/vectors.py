"""From the inputs of an admitted request to the vectors of an embedding model, for who answers with them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from aiohttp import web

from gateway.embedding import Embedding, EmbeddingPlan
from gateway.errors import context_length_exceeded, invalid_request
from gateway.generation import Usage
from gateway.openai.admission import Admission, Admitted
from gateway.openai.embeddings_body import VectorsBody
from gateway.priority import class_of
from gateway.services import Services
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

    async def plan(
        self, admitted: Admitted[BodyT], inputs: Inputs, dimensions: int | None = None
    ) -> EmbeddingPlan:
        """Raises ApiError 400 that names the first input that cannot be embedded."""
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
        admitted.exchange.span.set_attribute(SpanAttribute.INPUT_TOKENS, plan.num_tokens)
        return plan

    async def answer(
        self,
        admitted: Admitted[BodyT],
        plan: EmbeddingPlan,
        write: Callable[[Sequence[memoryview]], Awaitable[bytes]],
    ) -> web.Response:
        """Runs the plan within the tenant's limits; `write` makes the JSON of the answer from the vectors."""
        async with self._admission.running(admitted) as reservation:
            placement = self._admission.placement(admitted)
            timeout_s = self._services.config.gateway.first_token_timeout_s
            embedding = Embedding(plan, placement, admitted.exchange.span, timeout_s)
            try:
                self._admission.place(admitted, placement, embedding.start)
                vectors = await embedding.vectors()
                admitted.account.first_token_at = admitted.account.last_token_at = time.monotonic()
            finally:  # also when cancelled: it does not wait
                embedding.close()
                admitted.account.usage = Usage(plan.num_tokens, 0, 0)
            document = await write(vectors)
            assert placement.choice is not None, "who has answered was chosen"
            self._services.metrics.embedded(
                admitted.variant.model, placement.choice.engine_id, admitted.exchange.arrived_at
            )
            return web.Response(
                body=document,
                content_type="application/json",
                headers=admitted.answer_headers(reservation, placement.choice),
            )


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
