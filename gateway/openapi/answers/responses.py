"""`/v1/responses`."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openai.conversation import ReasoningEffort
from gateway.openapi.answers import CLOSED
from gateway.openapi.answers.generation import TokenLogprob


@with_config(CLOSED)
class InputText(TypedDict):
    type: Literal["input_text"]
    text: str


@with_config(CLOSED)
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: NotRequired[list[TokenLogprob]]


@with_config(CLOSED)
class ReasoningTextAnswer(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@with_config(CLOSED)
class SummaryTextAnswer(TypedDict):
    type: Literal["summary_text"]
    text: str


ItemStatusAnswer = Literal["in_progress", "completed", "incomplete"]


@with_config(CLOSED)
class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatusAnswer
    role: Literal["assistant"]
    content: list[OutputText]


@with_config(CLOSED)
class ReasoningItemAnswer(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: NotRequired[ItemStatusAnswer]
    summary: list[SummaryTextAnswer]
    content: list[ReasoningTextAnswer]


@with_config(CLOSED)
class FunctionCallAnswer(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatusAnswer
    call_id: str
    name: str
    arguments: str


@with_config(CLOSED)
class InputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatusAnswer
    role: Literal["user", "system", "developer"]
    content: list[InputText]


@with_config(CLOSED)
class FunctionCallOutputAnswer(TypedDict):
    id: str
    type: Literal["function_call_output"]
    status: ItemStatusAnswer
    call_id: str
    output: str


OutputItem = OutputMessage | ReasoningItemAnswer | FunctionCallAnswer


@with_config(CLOSED)
class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


@with_config(CLOSED)
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


@with_config(CLOSED)
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@with_config(CLOSED)
class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@with_config(CLOSED)
class ResponseError(TypedDict):
    code: str
    message: str


@with_config(CLOSED)
class ReasoningAnswer(TypedDict):
    effort: ReasoningEffort | None
    summary: None


@with_config(CLOSED)
class ResponseText(TypedDict):
    format: dict[str, object]
    verbosity: Literal["medium"]


@with_config(CLOSED)
class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningAnswer
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, object]
    tools: list[dict[str, object]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


@with_config(CLOSED)
class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


@with_config(CLOSED)
class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


@with_config(CLOSED)
class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[InputMessage | FunctionCallOutputAnswer | OutputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
