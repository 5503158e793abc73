"""Request bodies, checked at the door. Unknown fields are refused by name.

Fields that OpenAI or vLLM know but that are not served yet are listed with the one value that
means "off", so that a client which always sends them works and one which needs them is told.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from gateway.errors import ApiError, invalid_request

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16

INT32_MAX = 2**31 - 1
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Label = Annotated[str, StringConstraints(max_length=512)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    include_usage: bool = False


class ResponseFormat(Body):
    type: Literal["text"]


class GenerationBody(Body):
    """Fields that chat and plain completions share."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, float] | None = None
    user: Label | None = None
    # vLLM's
    top_k: int = Field(0, ge=-1, le=INT32_MAX)
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, le=10, allow_inf_nan=False)
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Label | None = None
    # accepted without effect: they are about the caller's own bookkeeping
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def max_output_tokens(self) -> int | None:
        """None: as many as the context allows."""
        return self.max_tokens


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: Label | None = None
    tool_call_id: Label | None = None
    refusal: None = None
    tool_calls: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None:
            raise ValueError("a message needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: parts joined, the newer role name as the older one."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatCompletionBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    # not served yet
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ]
    )
    # not served yet
    suffix: Literal[""] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None

    @property
    def max_output_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default


AnyBody = TypeVar("AnyBody", bound=Body)


def check_body(kind: type[AnyBody], document: object) -> AnyBody:
    """The body of a request. Raises ApiError 400 that names the first wrong field."""
    if not isinstance(document, dict):
        raise invalid_request("The request body must be a JSON object.")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _from_validation_error(error) from error


def _from_validation_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    # Parts of the location that name a branch of a union ("list[...]", "str") mean nothing to a client.
    path = [
        part
        for part in first["loc"]
        if isinstance(part, int) or (part.replace("_", "").isalnum() and part not in ("str", "int"))
    ]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if first["type"] == "extra_forbidden":
        return invalid_request(f"Unrecognized request argument: {param}", param, "unknown_parameter")
    if first["type"] == "missing":
        return invalid_request(f"Missing required parameter: {param}", param, "missing_required_parameter")
    return invalid_request(f"Invalid value for {param}: {first['msg']}", param or None, "invalid_value")
