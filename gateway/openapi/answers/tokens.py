"""Texts and their tokens: what vLLM has beside OpenAI's API."""

from __future__ import annotations

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@with_config(CLOSED)
class DetokenizedText(TypedDict):
    prompt: str


@with_config(CLOSED)
class RenderedRequest(TypedDict):
    """vLLM's GenerateRequest, with the text of the prompt."""

    request_id: str
    prompt: str
    token_ids: list[int]
    model: str
    sampling_params: dict[str, object]  # vLLM's, under their names
    features: None
    stream: bool
    stream_options: dict[str, object] | None
    cache_salt: str | None
    priority: int
