"""`POST /v1/embeddings`: texts in, vectors out."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway import long_work
from gateway.openai.embeddings_body import EmbeddingsBody
from gateway.openai.vectors import Vectors
from gateway.services import Services

LONG_ANSWER_BYTES = 65_536  # of vectors: reading or writing more than this takes milliseconds


class EmbeddingsEndpoint:
    def __init__(self, services: Services) -> None:
        self._vectors = Vectors(services, EmbeddingsBody, operation="embeddings")

    async def handle(self, request: web.Request) -> web.Response:
        admitted = await self._vectors.admit(request)
        body, model = admitted.body, admitted.route.name
        is_base64 = body.encoding_format == "base64"

        async def write(vectors: Sequence[memoryview], num_tokens: int) -> bytes:
            return await long_work.do(
                lambda: _document(vectors, model, num_tokens, is_base64=is_base64),
                is_long=is_long(vectors),
            )

        return await self._vectors.answer(admitted, body, write, body.dimensions)


def is_long(vectors: Sequence[memoryview]) -> bool:
    return sum(len(vector) for vector in vectors) >= LONG_ANSWER_BYTES


def _document(vectors: Sequence[memoryview], model: str, num_tokens: int, *, is_base64: bool) -> bytes:
    """The JSON of an answer, vector by vector: one call for all would keep the interpreter to itself."""
    entries = []
    for index, vector in enumerate(vectors):
        embedding = base64.b64encode(vector).decode() if is_base64 else floats(vector)
        entries.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": embedding}))
    rest: dict[str, Any] = {
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return b'{"object":"list","data":[%s],%s' % (b",".join(entries), msgspec.json.encode(rest)[1:])


def floats(vector: memoryview) -> list[float]:
    """The numbers of a vector as it comes from an engine: float32, little-endian."""
    numbers = array("f")
    numbers.frombytes(vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
