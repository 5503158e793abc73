"""The JSON of answers that are not streamed, as types. Tests hold real answers against them.

They are closed: a field that is sent and not listed here fails those tests. `NotRequired` marks what is only
there where a request asked for it, or where there is something to tell.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

_CLOSED = ConfigDict(extra="forbid")

# ---------------------------------------------------------------------------------------- errors


@with_config(_CLOSED)
class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None  # the field that is wrong, e.g. `messages[0].content`
    code: str | None


@with_config(_CLOSED)
class ErrorAnswer(TypedDict):
    error: ErrorDetails


# ------------------------------------------------------------------------------------ generation


@with_config(_CLOSED)
class PromptTokensDetails(TypedDict):
    cached_tokens: int


@with_config(_CLOSED)
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@with_config(_CLOSED)
class RankedTokenAnswer(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedTokenAnswer] | None]  # by token ids; the first token has none


@with_config(_CLOSED)
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@with_config(_CLOSED)
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@with_config(_CLOSED)
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


@with_config(_CLOSED)
class CalledFunctionAnswer(TypedDict):
    name: str
    arguments: str  # JSON, as the model wrote it


@with_config(_CLOSED)
class ToolCallAnswer(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


@with_config(_CLOSED)
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]


@with_config(_CLOSED)
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None  # vLLM's: the stop string or token that ended it
    token_ids: NotRequired[list[int]]


@with_config(_CLOSED)
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


@with_config(_CLOSED)
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@with_config(_CLOSED)
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@with_config(_CLOSED)
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


# -------------------------------------------------------------------------------- /v1/responses


@with_config(_CLOSED)
class InputText(TypedDict):
    type: Literal["input_text"]
    text: str


@with_config(_CLOSED)
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: NotRequired[list[TokenLogprob]]


@with_config(_CLOSED)
class ReasoningTextAnswer(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@with_config(_CLOSED)
class SummaryTextAnswer(TypedDict):
    type: Literal["summary_text"]
    text: str


ItemStatusAnswer = Literal["in_progress", "completed", "incomplete"]


@with_config(_CLOSED)
class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatusAnswer
    role: Literal["assistant"]
    content: list[OutputText]


@with_config(_CLOSED)
class ReasoningItemAnswer(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: NotRequired[ItemStatusAnswer]
    summary: list[SummaryTextAnswer]
    content: list[ReasoningTextAnswer]


@with_config(_CLOSED)
class FunctionCallAnswer(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatusAnswer
    call_id: str
    name: str
    arguments: str


@with_config(_CLOSED)
class InputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatusAnswer
    role: Literal["user", "system", "developer"]
    content: list[InputText]


@with_config(_CLOSED)
class FunctionCallOutputAnswer(TypedDict):
    id: str
    type: Literal["function_call_output"]
    status: ItemStatusAnswer
    call_id: str
    output: str


OutputItem = OutputMessage | ReasoningItemAnswer | FunctionCallAnswer


@with_config(_CLOSED)
class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


@with_config(_CLOSED)
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


@with_config(_CLOSED)
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@with_config(_CLOSED)
class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@with_config(_CLOSED)
class ResponseError(TypedDict):
    code: str
    message: str


@with_config(_CLOSED)
class ReasoningAnswer(TypedDict):
    effort: None
    summary: None


@with_config(_CLOSED)
class ResponseText(TypedDict):
    format: dict[str, object]
    verbosity: Literal["medium"]


@with_config(_CLOSED)
class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    background: Literal[False]
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


@with_config(_CLOSED)
class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


@with_config(_CLOSED)
class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[InputMessage | FunctionCallOutputAnswer | OutputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


# --------------------------------------------------------------------------------- /v1/messages


@with_config(_CLOSED)
class MessageErrorDetails(TypedDict):
    type: str
    message: str  # it names the field that is wrong


@with_config(_CLOSED)
class MessageErrorAnswer(TypedDict):
    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str


@with_config(_CLOSED)
class TextBlockAnswer(TypedDict):
    type: Literal["text"]
    text: str


@with_config(_CLOSED)
class ThinkingBlockAnswer(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


@with_config(_CLOSED)
class ToolUseBlockAnswer(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]


@with_config(_CLOSED)
class MessageUsage(TypedDict):
    input_tokens: int  # without those that were cached
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


@with_config(_CLOSED)
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


@with_config(_CLOSED)
class TokenCount(TypedDict):
    input_tokens: int


# -------------------------------------------------------------------------------- text and tokens


@with_config(_CLOSED)
class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@with_config(_CLOSED)
class DetokenizedText(TypedDict):
    prompt: str


@with_config(_CLOSED)
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


# ----------------------------------------------------------------------------------- embeddings


@with_config(_CLOSED)
class InputUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@with_config(_CLOSED)
class EmbeddingEntry(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # text: base64 of little-endian float32


@with_config(_CLOSED)
class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: InputUsage


@with_config(_CLOSED)
class ScoreEntry(TypedDict):
    index: int
    object: Literal["score"]
    score: float


@with_config(_CLOSED)
class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    data: list[ScoreEntry]
    model: str
    usage: InputUsage


@with_config(_CLOSED)
class RankedText(TypedDict):
    text: str


@with_config(_CLOSED)
class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


@with_config(_CLOSED)
class Ranking(TypedDict):
    id: str
    results: list[RankedDocument]
    model: str
    usage: InputUsage


# --------------------------------------------------------------------------------------- models


@with_config(_CLOSED)
class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None  # None: no engine of it is ready
    runner: Literal["generate", "pooling"]


@with_config(_CLOSED)
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]


# ------------------------------------------------------------------------------------ operation


@with_config(_CLOSED)
class Readiness(TypedDict):
    ready: bool
    models_without_engine: list[str]


@with_config(_CLOSED)
class Health(TypedDict):
    healthy: bool
    engines: list[str]
    stalled: list[str]


@with_config(_CLOSED)
class EngineLoadAnswer(TypedDict):
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    outstanding_tokens: int
    num_steps: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    max_num_seqs_now: int
    max_num_tokens_now: int
    decode_step_p95_ms: float
    meets_itl_target: bool | None


@with_config(_CLOSED)
class EngineState(TypedDict):
    engine_id: str
    epoch: str
    model: str
    state: Literal["connecting", "ready", "draining", "lost"]
    in_flight: int
    outstanding_tokens: int
    load: EngineLoadAnswer | None


@with_config(_CLOSED)
class AdminStatus(TypedDict):
    policy_version: int
    tenants: list[str]
    routes: list[str]
    draining: bool
    engines: list[EngineState]


@with_config(_CLOSED)
class ResetAnswer(TypedDict):
    engines_told: int
