"""Faults of `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import Planted, at, crashes, ignores, tells
from tests.conformance.wrong_server import Asked

SCORE = "/v1/score"
RERANK = "/v1/rerank"


def all_come_first(document: dict[str, Any]) -> None:
    for entry in document["data"]:
        entry["index"] = 0


def a_distance(document: dict[str, Any]) -> None:
    for entry in document["data"]:
        entry["score"] = 1.0 - entry["score"]


def backwards(document: dict[str, Any]) -> None:
    scores = [entry["score"] for entry in document["data"]]
    for entry, score in zip(document["data"], reversed(scores), strict=True):
        entry["score"] = score


def as_they_came(document: dict[str, Any]) -> None:
    document["results"].sort(key=lambda result: result["index"])


def by_percent(document: dict[str, Any]) -> None:
    for result in document["results"]:
        result["relevance_score"] *= 100


def does_not_fit(asked: Asked) -> bool:
    first = asked.document.get("text_1")
    return at(SCORE)(asked) and isinstance(first, list) and len(first) == 2


FAULTS: list[Planted] = [
    tells("all scores come first", at(SCORE), all_come_first, "scores.a-score-has-the-shape"),
    tells(
        "a score is a distance",
        at(SCORE),
        a_distance,
        "scores.a-text-is-most-like-itself",
        "scores.a-ranking-has-the-scores",
    ),
    tells(
        "pairs are told backwards",
        lambda asked: at(SCORE)(asked) and isinstance(asked.document.get("text_1"), list),
        backwards,
        "scores.pairs-are-compared-one-by-one",
    ),
    crashes("two texts against three", does_not_fit, "scores.lists-that-do-not-fit-are-refused"),
    tells(
        "a ranking is not sorted",
        at(RERANK),
        as_they_came,
        "scores.a-ranking-has-the-shape",
        "scores.top-n-limits-a-ranking",
    ),
    tells("relevance is in percent", at(RERANK), by_percent, "scores.a-ranking-has-the-scores"),
    ignores("top_n", at(RERANK), "scores.top-n-limits-a-ranking"),
    ignores("return_documents", at(RERANK), "scores.documents-come-back-on-request"),
    crashes("a ranking of nothing", at(RERANK, documents=[]), "scores.a-ranking-needs-documents"),
]
