"""`/v1/models`, in OpenAI's shape and in Anthropic's, whose clients send the header `anthropic-version`."""

from __future__ import annotations

from typing import Literal

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None  # None: no engine of it is ready
    runner: Literal["generate", "pooling"]


@with_config(CLOSED)
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]


@with_config(CLOSED)
class ModelInfo(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None


@with_config(CLOSED)
class ModelPage(TypedDict):
    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
