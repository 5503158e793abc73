"""`POST /v1/score` (vLLM's) and `/v1/rerank` (Jina's and Cohere's): how alike texts are."""

from __future__ import annotations

import math
from typing import Any

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable, check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

QUERY = "a river in the mountains"
DOCUMENTS = ["the weather of tomorrow", QUERY, "three"]


async def ask(server: Server, path: str, fields: dict[str, Any]) -> Answer:
    answer = await server.post(path, {"model": server.embedding_model, **fields})
    if answer.status == 400 and server.target.embedding_model is None:
        raise NotApplicable(f"no embedding model is known (--embedding-model): {answer.says}")
    return answer


async def score(server: Server, first: Any, second: Any) -> dict[str, Any]:
    answer = await ask(server, "/v1/score", {"text_1": first, "text_2": second})
    document: dict[str, Any] = answer.ok().json
    return document


async def scores_of(server: Server, first: Any, second: Any) -> list[float]:
    return [entry["score"] for entry in (await score(server, first, second))["data"]]


async def rerank(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await ask(server, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, **fields})
    document: dict[str, Any] = answer.ok().json
    return document


def check_close(found: list[float], expected: list[float], what: str) -> None:
    same = len(found) == len(expected) and all(
        math.isclose(a, b, abs_tol=1e-3) for a, b in zip(found, expected, strict=True)
    )
    check(same, f"{what} are {found}, not {expected}")


@row
async def a_score_has_the_shape(server: Server) -> None:
    """A list of scores in order, and the tokens that they took."""
    document = await score(server, QUERY, DOCUMENTS)
    check_equal(document["object"], "list", "object")
    check_equal([entry["index"] for entry in document["data"]], [0, 1, 2], "the indices")
    check(all(isinstance(entry["score"], float) for entry in document["data"]), "a score is no number")
    check(document["usage"]["total_tokens"] > 0, "usage counts no tokens")


@row
async def a_text_is_most_like_itself(server: Server) -> None:
    """Of several texts the same one has the highest score."""
    scores = await scores_of(server, QUERY, DOCUMENTS)
    check_equal(max(scores), scores[1], "the highest score")
    check(len(set(scores)) == len(scores), f"different texts are equally alike: {scores}")


@row
async def pairs_are_compared_one_by_one(server: Server) -> None:
    """Two lists of one length are pairs; each scores what it does alone."""
    firsts = [QUERY, DOCUMENTS[0], DOCUMENTS[2]]
    together = await scores_of(server, firsts, DOCUMENTS)
    alone = [(await scores_of(server, a, b))[0] for a, b in zip(firsts, DOCUMENTS, strict=True)]
    check_close(together, alone, "the scores")


@row
async def lists_that_do_not_fit_are_refused(server: Server) -> None:
    """Two texts against three, and none at all, are a 400."""
    await score(server, QUERY, QUERY)  # the route is there
    for first, second in ((DOCUMENTS[:2], DOCUMENTS), ([], DOCUMENTS), (QUERY, [])):
        (await ask(server, "/v1/score", {"text_1": first, "text_2": second})).refused(400)


@row
async def a_ranking_has_the_shape(server: Server) -> None:
    """Results name documents by their index, most relevant first."""
    document = await rerank(server)
    results = document["results"]
    check_equal(sorted(result["index"] for result in results), [0, 1, 2], "the set of indices")
    relevances = [result["relevance_score"] for result in results]
    check_equal(relevances, sorted(relevances, reverse=True), "the order of relevance")
    check_equal(results[0]["index"], 1, "the most relevant document")


@row
async def a_ranking_has_the_scores(server: Server) -> None:
    """Relevance is what /v1/score says of the same two texts."""
    scores = await scores_of(server, QUERY, DOCUMENTS)
    results = sorted((await rerank(server))["results"], key=lambda result: result["index"])
    check_close([result["relevance_score"] for result in results], scores, "the relevances")


@row
async def top_n_limits_a_ranking(server: Server) -> None:
    """top_n gives the first so many results."""
    results = (await rerank(server))["results"]
    indices = [result["index"] for result in (await rerank(server, top_n=2))["results"]]
    check_equal(indices, [result["index"] for result in results[:2]], "the indices")


@row
async def documents_come_back_on_request(server: Server) -> None:
    """return_documents says whether results hold their texts."""
    with_texts = (await rerank(server, return_documents=True))["results"]
    texts = [result["document"]["text"] for result in with_texts]
    check_equal(texts, [DOCUMENTS[result["index"]] for result in with_texts], "the texts")
    without = (await rerank(server, return_documents=False))["results"]
    check(all(result.get("document") is None for result in without), "texts come uninvited")


@row
async def a_ranking_needs_documents(server: Server) -> None:
    """No documents, and no query, are a 400 of what is missing."""
    await rerank(server)  # the route is there
    for name in ("documents", "query"):
        fields: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
        del fields[name]
        (await ask(server, "/v1/rerank", fields)).refused(400, param=name)
    (await ask(server, "/v1/rerank", {"query": QUERY, "documents": []})).refused(400, param="documents")
