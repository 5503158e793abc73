"""/v1/score and /v1/rerank: checked against the vectors that /v1/embeddings gives for the same texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gateway.openai.scoring import cosine
from tests.http_client import Answer
from tests.integration.text_stack import ALIKE, EMBEDDER, TextStack
from tests.integration.text_stack import EMBEDDER_MAX_LEN as MAX_LEN

TEXTS = ["water", "falls", "to the turbine", "a fox"]


def post(stack: TextStack, path: str, *, key: str | None = None, **fields: Any) -> Answer:
    return stack.post(path, key=key, **{"model": EMBEDDER, **fields})


@pytest.fixture(scope="module")
def vector_of(text_stack: TextStack) -> dict[str, np.ndarray]:
    data = post(text_stack, "/v1/embeddings", input=TEXTS).json["data"]
    return {text: np.array(entry["embedding"]) for text, entry in zip(TEXTS, data, strict=True)}


def similarity(vector_of: dict[str, np.ndarray], first: str, second: str) -> float:
    a, b = vector_of[first], vector_of[second]
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_one_text_is_compared_with_each_of_many_under_each_of_vllms_names(text_stack, vector_of, names, path):
    answer = post(text_stack, path, **{names[0]: TEXTS[0], names[1]: TEXTS[1:]})
    assert (answer.status, answer.json["object"], answer.json["model"]) == (200, "list", "embedder")
    assert [entry["index"] for entry in answer.json["data"]] == [0, 1, 2]
    got = [entry["score"] for entry in answer.json["data"]]
    np.testing.assert_allclose(got, [similarity(vector_of, TEXTS[0], text) for text in TEXTS[1:]], atol=1e-9)
    num_tokens = sum(map(len, TEXTS))  # a byte each
    assert answer.json["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer.headers["x-headrace-engine"] == "embedder-0"


def test_as_many_texts_are_compared_one_by_one(text_stack, vector_of):
    answer = post(text_stack, "/v1/score", text_1=TEXTS[:2], text_2=TEXTS[2:])
    got = [entry["score"] for entry in answer.json["data"]]
    pairs = zip(TEXTS[:2], TEXTS[2:], strict=True)
    np.testing.assert_allclose(got, [similarity(vector_of, *pair) for pair in pairs], atol=1e-9)


def test_one_text_with_one_other_and_with_itself(text_stack, vector_of):
    [entry] = post(text_stack, "/v1/score", text_1="water", text_2="falls").json["data"]
    assert entry["score"] == pytest.approx(similarity(vector_of, "water", "falls"), abs=1e-9)
    [entry] = post(text_stack, "/v1/score", text_1="water", text_2="water").json["data"]
    assert 1.0 - 1e-6 <= entry["score"] <= 1.0


def test_a_text_that_occurs_often_is_embedded_once(text_stack):
    before = text_stack.num_prompt_tokens
    answer = post(text_stack, "/v1/score", text_1="falls", text_2=["water"] * 50 + ["falls"] * 50)
    assert len(answer.json["data"]) == 100
    assert answer.json["usage"]["prompt_tokens"] == 10
    assert text_stack.num_prompt_tokens - before == 10


def test_vectors_without_a_direction_are_like_nothing_and_rounding_stays_within_bounds() -> None:
    assert cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
    assert cosine([0.1] * 3, [0.1] * 3) <= 1.0
    assert cosine([3.0, 4.0], [-6.0, -8.0]) == -1.0


# ---------------------------------------------------------------------- ranks


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_back_by_relevance(text_stack, vector_of, path):
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    answer = post(text_stack, path, query=TEXTS[0], documents=documents)
    assert answer.status == 200
    expected = [similarity(vector_of, TEXTS[0], text) for text in TEXTS[1:]]
    results = answer.json["results"]
    assert [result["index"] for result in results] == list(np.argsort(expected)[::-1])
    for result in results:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-9)
        assert result["document"] == {"text": TEXTS[1:][result["index"]]}
    assert answer.json["usage"]["total_tokens"] == sum(map(len, TEXTS))
    assert answer.json["id"].startswith("rerank-")


def test_of_documents_that_are_equally_relevant_the_earlier_comes_first(text_stack):
    results = post(text_stack, "/v1/rerank", query="a", documents=["b", "a", "b", "a"]).json["results"]
    assert [result["index"] for result in results] == [1, 3, 0, 2]


def test_fewer_results_and_no_texts_on_request(text_stack):
    results = post(
        text_stack, "/v1/rerank", query="a", documents=["b", "a", "c"], top_n=1, return_documents=False
    ).json["results"]
    assert [(result["index"], set(result)) for result in results] == [(1, {"index", "relevance_score"})]
    for top_n in (0, 7, None):
        answer = post(text_stack, "/v1/rerank", query="a", documents=["b", "c"], top_n=top_n)
        assert len(answer.json["results"]) == 2


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"queries": "a"}, "documents"),
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c" * (MAX_LEN + 1)]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a" * (MAX_LEN + 1), "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "data_1": "c"}, "data_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "writer"}, "model"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 1]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": ""}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"body": "c"}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c" * 101}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_k": 1}, "top_k"),
    ],
)
def test_what_cannot_be_compared_is_400_and_named(text_stack, path, fields, param):
    answer = post(text_stack, path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_keys_routes_and_limits_hold_as_for_the_other_endpoints(text_stack):
    fields = {"text_1": "a", "text_2": "b"}
    assert post(text_stack, "/v1/score", **fields, key="hr-wrong").status == 401
    assert post(text_stack, "/v1/score", **fields, **{"model": "nobody"}).status == 404
    assert post(text_stack, "/v1/score", **fields, **{"model": ALIKE}).json["model"] == ALIKE
    seldom = text_stack.key("seldom")
    assert post(text_stack, "/v1/score", **fields, key=seldom).status == 200
    assert post(text_stack, "/v1/rerank", query="a", documents=["b"], key=seldom).status == 429
