"""`POST /v1/embeddings`: the life of one request, from the key to the last byte."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway.embedding import Embedding, EmbeddingPlan
from gateway.errors import context_length_exceeded, invalid_request
from gateway.openai.admission import PRIORITY_NUMBERS, Admission, Admitted
from gateway.openai.embeddings_body import EmbeddingsBody
from gateway.services import Services
from shared.embedding_limits import dim_of
from shared.identifiers import TenantId
from shared.messages import ModelCard
from shared.telemetry import SpanAttribute, SpanName
from shared.tokenizer import Tokenizer

LONG_ANSWER_BYTES = 65_536  # of vectors: writing more than this as text takes milliseconds


class EmbeddingsEndpoint:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._admission = Admission(services, EmbeddingsBody, operation="embeddings", runner="pooling")

    async def handle(self, request: web.Request) -> web.Response:
        admitted = await self._admission.admit(request)
        plan = await self._plan(admitted)
        async with self._admission.running(admitted) as reservation:
            placement = self._admission.placement(admitted)
            timeout_s = self._services.config.gateway.first_token_timeout_s
            embedding = Embedding(plan, placement, admitted.exchange.span, timeout_s)
            try:
                self._admission.place(admitted, placement, embedding.start)
                vectors = await embedding.vectors()
            finally:  # also when cancelled: it does not wait
                embedding.close()
            answer = await self._answer(admitted, plan, vectors)
            assert placement.choice is not None, "who has answered was chosen"
            self._observe(admitted, placement.choice.engine_id)
            return web.Response(
                body=answer,
                content_type="application/json",
                headers=admitted.answer_headers(reservation, placement.choice),
            )

    async def _plan(self, admitted: Admitted[EmbeddingsBody]) -> EmbeddingPlan:
        body, card, tenant = admitted.body, admitted.engine.card, admitted.tenant
        dim = dim_of(body.dimensions, card)
        tokenizer = admitted.engine.tokenizer
        with self._admission.span(SpanName.TOKENIZE, admitted.exchange) as span:
            token_id_lists = await admitted.encode(lambda: _encode(body, tokenizer, card))
            plan = EmbeddingPlan(
                token_id_lists,
                dim,
                shortens=dim < card.embedding_dim,
                tenant=TenantId(tenant.name),
                priority=PRIORITY_NUMBERS[tenant.priority],
            )
            span.set_attribute(SpanAttribute.INPUT_TOKENS, plan.num_tokens)
        admitted.exchange.span.set_attribute(SpanAttribute.INPUT_TOKENS, plan.num_tokens)
        return plan

    async def _answer(
        self, admitted: Admitted[EmbeddingsBody], plan: EmbeddingPlan, vectors: Sequence[memoryview]
    ) -> bytes:
        is_base64 = admitted.body.encoding_format == "base64"
        arguments = (vectors, admitted.route.name, plan.num_tokens)
        if sum(len(vector) for vector in vectors) < LONG_ANSWER_BYTES:
            return _document(*arguments, is_base64=is_base64)
        return await asyncio.to_thread(_document, *arguments, is_base64=is_base64)

    def _observe(self, admitted: Admitted[EmbeddingsBody], engine_id: str) -> None:
        metrics = self._services.metrics
        metrics.embedded(admitted.variant.model, engine_id, admitted.exchange.arrived_at)


def _encode(body: EmbeddingsBody, tokenizer: Tokenizer, card: ModelCard) -> list[list[int]]:
    """Tokens of every input. Raises ApiError 400 that names the first one that cannot be embedded."""
    for index, given in enumerate(body.inputs):
        if isinstance(given, str):
            _refuse_beyond(tokenizer.min_num_tokens(len(given)), body, index, card)
    inputs = body.inputs
    token_id_lists = [
        *tokenizer.encode_whole([given for given in inputs if isinstance(given, str)]),
        *(given for given in inputs if not isinstance(given, str)),
    ]
    for index, token_ids in enumerate(token_id_lists):
        _refuse_beyond(len(token_ids), body, index, card)
        param = body.param_of(index)
        if not token_ids:
            raise invalid_request("The text has no tokens.", param, "invalid_value")
        if max(token_ids) >= card.vocab_size:
            raise invalid_request(f"Token ids must be below {card.vocab_size}.", param, "invalid_value")
    return token_id_lists


def _refuse_beyond(num_tokens: int, body: EmbeddingsBody, index: int, card: ModelCard) -> None:
    if num_tokens > card.max_model_len:
        raise context_length_exceeded(
            f"This model's maximum input length is {card.max_model_len} tokens, but this text has "
            f"at least {num_tokens}.",
            body.param_of(index),
        )


def _document(vectors: Sequence[memoryview], model: str, num_tokens: int, *, is_base64: bool) -> bytes:
    """The JSON of an answer, vector by vector: one call for all would keep the interpreter to itself."""
    entries = []
    for index, vector in enumerate(vectors):
        embedding = base64.b64encode(vector).decode() if is_base64 else _floats(vector)
        entries.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": embedding}))
    rest: dict[str, Any] = {
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return b'{"object":"list","data":[%s],%s' % (b",".join(entries), msgspec.json.encode(rest)[1:])


def _floats(vector: memoryview) -> list[float]:
    numbers = array("f")
    numbers.frombytes(vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
