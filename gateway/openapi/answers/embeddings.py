"""Vectors, and how alike they are."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class InputUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@with_config(CLOSED)
class EmbeddingEntry(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # text: base64 of little-endian float32


@with_config(CLOSED)
class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: InputUsage


@with_config(CLOSED)
class ScoreEntry(TypedDict):
    index: int
    object: Literal["score"]
    score: float


@with_config(CLOSED)
class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    data: list[ScoreEntry]
    model: str
    usage: InputUsage


@with_config(CLOSED)
class RankedText(TypedDict):
    text: str


@with_config(CLOSED)
class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


@with_config(CLOSED)
class Ranking(TypedDict):
    id: str
    results: list[RankedDocument]
    model: str
    usage: InputUsage
