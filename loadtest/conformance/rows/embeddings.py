"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable, check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

TEXTS = ["a river", "the weather of tomorrow", "three"]


async def embed(server: Server, given: Any, **fields: Any) -> Answer:
    body = {"model": server.embedding_model, "input": given, **fields}
    return await server.post("/v1/embeddings", body)


async def vectors_of(server: Server, given: Any, **fields: Any) -> list[Any]:
    answer = await embed(server, given, **fields)
    if answer.status == 400 and server.target.embedding_model is None:
        raise NotApplicable(f"no embedding model is known (--embedding-model): {answer.says}")
    return [entry["embedding"] for entry in answer.ok().json["data"]]


def are_close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, abs_tol=1e-3) for a, b in zip(one, other, strict=True)
    )


@row
async def answer_has_the_shape(server: Server) -> None:
    """A list of embeddings in order, and the tokens that they took."""
    await vectors_of(server, TEXTS)
    document = (await embed(server, TEXTS)).ok().json
    check_equal(document["object"], "list", "object")
    check_equal([entry["index"] for entry in document["data"]], [0, 1, 2], "the indices")
    check_equal({entry["object"] for entry in document["data"]}, {"embedding"}, "the set of objects")
    check_equal(document["usage"]["total_tokens"], document["usage"]["prompt_tokens"], "total_tokens")


@row
async def base64_is_the_same_numbers(server: Server) -> None:
    """base64 is float32, little-endian, of the same vectors: what the official clients ask for."""
    floats = await vectors_of(server, TEXTS)
    for plain, packed in zip(floats, await vectors_of(server, TEXTS, encoding_format="base64"), strict=True):
        data = base64.b64decode(packed)
        check_equal(len(data), 4 * len(plain), "the number of bytes")
        check(are_close(list(struct.unpack(f"<{len(plain)}f", data)), plain), "the numbers differ")


@row
async def a_list_keeps_its_order(server: Server) -> None:
    """Each vector of a list is that of its text alone."""
    together = await vectors_of(server, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        check(
            are_close((await vectors_of(server, text))[0], vector),
            f"the vector of {text!r} is another one alone",
        )


@row
async def texts_differ(server: Server) -> None:
    """Different texts have different vectors."""
    one, other, _ = await vectors_of(server, TEXTS)
    check(not are_close(one, other), "two texts have one vector")


@row
async def token_ids_are_taken(server: Server) -> None:
    """A list of integers is one text, a list of lists several."""
    check_equal(len(await vectors_of(server, [40, 41, 42])), 1, "the number of vectors")
    check_equal(len(await vectors_of(server, [[40, 41], [42]])), 2, "the number of vectors")


@row
async def dimensions_are_kept_or_refused(server: Server) -> None:
    """dimensions shortens vectors, or is refused by its name."""
    full = len((await vectors_of(server, TEXTS[0]))[0])
    answer = await embed(server, TEXTS[0], dimensions=full // 2)
    if answer.status == 200:
        check_equal(len(answer.json["data"][0]["embedding"]), full // 2, "the length of the vector")
    else:
        answer.refused(400, param="dimensions")


@row
async def an_empty_input_is_refused(server: Server) -> None:
    """No text at all is a 400 of input."""
    await vectors_of(server, TEXTS[0])
    for given in ([], "", [""]):
        (await embed(server, given)).refused(400, param="input")


@row
async def a_generating_model_is_told_apart(server: Server) -> None:
    """A model that makes no embeddings is refused by the field model."""
    if server.target.embedding_model in (None, server.model):
        raise NotApplicable("there is no embedding model beside the one that generates")
    answer = await server.post("/v1/embeddings", {"model": server.model, "input": "x"})
    if answer.status != 200:
        answer.refused(400, param="model")
