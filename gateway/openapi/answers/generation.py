"""Chats and plain completions."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class PromptTokensDetails(TypedDict):
    cached_tokens: int


@with_config(CLOSED)
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@with_config(CLOSED)
class RankedTokenAnswer(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedTokenAnswer] | None]  # by token ids; the first token has none


@with_config(CLOSED)
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@with_config(CLOSED)
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@with_config(CLOSED)
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


@with_config(CLOSED)
class CalledFunctionAnswer(TypedDict):
    name: str
    arguments: str  # JSON, as the model wrote it


@with_config(CLOSED)
class ToolCallAnswer(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


@with_config(CLOSED)
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]


@with_config(CLOSED)
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None  # vLLM's: the stop string or token that ended it
    token_ids: NotRequired[list[int]]


@with_config(CLOSED)
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


@with_config(CLOSED)
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@with_config(CLOSED)
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@with_config(CLOSED)
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage
