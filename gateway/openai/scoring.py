"""`POST /v1/score` and `POST /v1/rerank`: how alike texts are, by the vectors of an embedding model.

A score is the cosine of the angle between two vectors, as vLLM has it for such models. `usage` counts what
was embedded: a text that occurs twice counts once.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway import long_work
from gateway.openai.admission import Admitted
from gateway.openai.embeddings import floats, is_long
from gateway.openai.scoring_body import DistinctTexts, RerankBody, ScoreBody
from gateway.openai.vectors import BodyT, Vectors
from gateway.services import Services
from shared.identifiers import fresh_request_id


class ScoreEndpoint:
    def __init__(self, services: Services) -> None:
        self._vectors = Vectors(services, ScoreBody, operation="score")

    async def handle(self, request: web.Request) -> web.Response:
        admitted = await self._vectors.admit(request)
        texts = DistinctTexts(admitted.body.named_texts)
        return await _answer(self._vectors, admitted, texts, _scores)


class RerankEndpoint:
    def __init__(self, services: Services) -> None:
        self._vectors = Vectors(services, RerankBody, operation="rerank")

    async def handle(self, request: web.Request) -> web.Response:
        admitted = await self._vectors.admit(request)
        texts = DistinctTexts(admitted.body.named_texts)
        return await _answer(self._vectors, admitted, texts, _ranking)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """0 where one of them has no direction, and never beyond 1, whatever rounding makes of it."""
    lengths = math.hypot(*first) * math.hypot(*second)
    if lengths == 0.0:
        return 0.0
    product: float = sum(map(operator.mul, first, second))
    return max(-1.0, min(1.0, product / lengths))


async def _answer(
    vectors: Vectors[BodyT],
    admitted: Admitted[BodyT],
    texts: DistinctTexts,
    make: Callable[[BodyT, Mapping[str, Sequence[float]]], dict[str, Any]],
) -> web.Response:
    """`make` gets the vector of each text and returns what the two endpoints differ in."""

    def document(given: Sequence[memoryview], num_tokens: int) -> bytes:
        vector_of = dict(zip(texts.inputs, map(floats, given), strict=True))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        fields = make(admitted.body, vector_of)
        return msgspec.json.encode({**fields, "model": admitted.route.name, "usage": usage})

    async def write(given: Sequence[memoryview], num_tokens: int) -> bytes:
        return await long_work.do(lambda: document(given, num_tokens), is_long=is_long(given))

    return await vectors.answer(admitted, texts, write)


def _scores(body: ScoreBody, vector_of: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    scores = [cosine(vector_of[first], vector_of[second]) for first, second in body.pairs]
    return {
        "id": f"score-{fresh_request_id()}",
        "object": "list",
        "created": int(time.time()),
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
    }


def _ranking(body: RerankBody, vector_of: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The most alike first; of those that are equally so, the earlier one."""
    query, texts = vector_of[body.query], body.texts
    scores = [cosine(query, vector_of[text]) for text in texts]
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
    results = []
    for index in order[: body.top_n or len(order)]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return {"id": f"rerank-{fresh_request_id()}", "results": results}
