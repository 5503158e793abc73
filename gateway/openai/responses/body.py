"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from gateway.openai.chat_message import FunctionName
from gateway.openai.conversation import ReasoningEffort
from gateway.openai.responses.items import InputItem, text_or_list
from gateway.openai.schema import INT32_MAX, SamplingFields, StreamableBody
from gateway.openai.strict_body import Body, FieldError, Label
from gateway.openai.tool_fields import MAX_TOOLS
from shared.sampling import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
MAX_ITEMS = 4096
MAX_METADATA = 16

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
Includable = Literal[
    "message.output_text.logprobs",
    # What these would add is never there: it belongs to OpenAI's own tools, to images, or, in the last
    # case, is told in clear.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class TextFormat(Body):
    """What the text has to look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema_where_one_is_meant(self) -> TextFormat:
        for name, value in (("name", self.name), ("schema", self.json_schema)):
            if (self.type == "json_schema") != (value is not None):
                raise FieldError(name, "it goes with the type 'json_schema', which needs it")
        return self

    @property
    def told(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {
            "type": "json_schema",
            "name": self.name,
            "description": self.description,
            "schema": self.json_schema,
            "strict": bool(self.strict),
        }


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """`effort` reaches the template of a model that heeds it. What a model thinks is told as it is, so there
    is nothing to be summarized."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponseTool(Body):
    """A function of the client, in this API's flat form."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, document: Any) -> Any:
        kind = document.get("type") if isinstance(document, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"tools of the type {kind[:64]!r} are not supported, only functions")
        return document

    @property
    def told(self) -> dict[str, Any]:
        return {**self.model_dump(), "strict": bool(self.strict)}


class FunctionChoice(Body):
    type: Literal["function"]
    name: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, document: Any) -> Any:
        kind = document.get("type") if isinstance(document, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"a choice of the type {kind[:64]!r} is not supported, only a function's")
        return document


class ResponsesBody(SamplingFields, StreamableBody):
    input: Annotated[
        Annotated[str, Tag("form:text")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS), Tag("form:list")],
        Discriminator(text_or_list),
    ]
    instructions: str | None = None
    previous_response_id: Label | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("form:text")]
            | Annotated[FunctionChoice, Tag("form:list")],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = Field(None, ge=0, le=INT32_MAX)  # of OpenAI's own tools: there are none
    text: TextOptions = TextOptions()
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Includable] = Field(default_factory=list, max_length=16)
    stream_options: ResponseStreamOptions | None = None
    reasoning: Reasoning | None = None
    store: bool = True
    metadata: Annotated[dict[MetadataKey, Label], Field(max_length=MAX_METADATA)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # accepted without effect
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: bool = False
    # not served yet
    truncation: Literal["disabled"] = "disabled"
    conversation: None = None
    prompt: None = None
    prompt_cache_retention: Literal["in_memory"] | None = None

    @field_validator("truncation", mode="before")
    @classmethod
    def _is_served(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError("conversations are not cut to fit; leave it 'disabled'")
        return value

    @model_validator(mode="after")
    def _asks_for_log_probabilities_in_full(self) -> ResponsesBody:
        if self.top_logprobs and not self.tells_logprobs:
            raise FieldError("top_logprobs", f"it needs {LOGPROBS!r} in include")
        if self.structured_outputs is not None and self.form_of_text["type"] != "text":
            raise FieldError("structured_outputs", "text.format asks for a form already")
        return self

    @model_validator(mode="after")
    def _can_be_asked_for_later(self) -> ResponsesBody:
        if self.background and self.stream:
            raise FieldError("stream", "what runs in the background is not streamed: ask for it by its id")
        if self.background and not self.store:
            raise FieldError("store", "what runs in the background is stored: it is asked for later")
        return self

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in self.include

    @property
    def form_of_text(self) -> dict[str, Any]:
        return (self.text.format or TextFormat()).told
