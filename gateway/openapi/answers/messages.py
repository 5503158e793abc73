"""Anthropic's `/v1/messages`."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class UnsupportedThread(TypedDict):
    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


@with_config(CLOSED)
class MessageErrorDetails(TypedDict):
    type: str
    message: str  # it names the field that is wrong
    details: NotRequired[UnsupportedThread]


@with_config(CLOSED)
class MessageErrorAnswer(TypedDict):
    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str


@with_config(CLOSED)
class TextBlockAnswer(TypedDict):
    type: Literal["text"]
    text: str


@with_config(CLOSED)
class ThinkingBlockAnswer(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


@with_config(CLOSED)
class ToolUseBlockAnswer(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]


@with_config(CLOSED)
class MessageUsage(TypedDict):
    input_tokens: int  # without those that were cached
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


@with_config(CLOSED)
class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlockAnswer | ThinkingBlockAnswer | ToolUseBlockAnswer]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage


@with_config(CLOSED)
class TokenCount(TypedDict):
    input_tokens: int
