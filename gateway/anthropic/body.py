"""Request bodies of Anthropic's Messages API. Unknown fields are refused by name.

Fields of services that are not offered here are listed with the one value that means "off".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, ValidationError, field_validator, model_validator
from pydantic_core import CoreSchema, InitErrorDetails

from gateway.anthropic.blocks import CacheControl, Message, TextBlock
from gateway.anthropic.tool_fields import MAX_TOOLS, ClientTool, ToolChoice
from gateway.openai.schema import INT32_MAX, MAX_STOP_STRINGS, ModelBody, StopString, StreamableBody
from gateway.openai.strict_body import Body, FieldError, Label

MAX_MESSAGES = 100_000  # Anthropic's


class Metadata(Body):
    user_id: Label | None = None


class Thinking(Body):
    """Whether the model should think first, for templates that heed it. How much is the model's affair:
    `budget_tokens` has no effect. `display`: what it thought is told as it is, or left out."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: JsonOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # as reasoning_effort


class ConversationFields(ModelBody):
    """What is said so far, and what may be done next. `user` is not a field of this API: it is what
    `metadata.user_id` says, under the name by which routes and limits know it."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_told_the_user_in_metadata(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        if "user" in document:
            unknown = InitErrorDetails(type="extra_forbidden", loc=("user",), input=document["user"])
            raise ValidationError.from_exception_data(cls.__name__, [unknown])
        metadata = document.get("metadata")
        user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
        return {**document, "user": user_id} if isinstance(user_id, str) else document

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        del handler.resolve_ref_schema(schema)["properties"]["user"]
        return schema

    @model_validator(mode="after")
    def _answers_only_what_was_called(self) -> ConversationFields:
        called: set[str] = set()
        for index, message in enumerate(self.messages):
            for place, block in enumerate(message.blocks):
                if block.type == "tool_use":
                    called.add(block.id)
                elif block.type == "tool_result" and block.tool_use_id not in called:
                    param = f"messages[{index}].content[{place}].tool_use_id"
                    raise FieldError(param, f"no tool_use block before it has the id {block.tool_use_id!r}")
        return self

    @model_validator(mode="after")
    def _ends_where_an_answer_can_begin(self) -> ConversationFields:
        last, param = self.messages[-1], f"messages[{len(self.messages) - 1}]"
        kinds = {block.type for block in last.blocks}
        if "tool_use" in kinds:
            raise FieldError(param, "what it calls needs tool_result blocks in a message behind it")
        if "thinking" in kinds and not last.text:
            raise FieldError(param, "a thought without a text cannot be continued")
        return self


class MessagesBody(ConversationFields, StreamableBody):
    max_tokens: int = Field(ge=1, le=INT32_MAX)
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0, le=INT32_MAX)
    # accepted without effect
    service_tier: Literal["auto", "standard_only"] | None = None
    # not served
    container: None = None
    inference_geo: None = None
    diagnostics: None = None
    # A conversation that the server keeps, so that its next turn comes without the others. Never to be left
    # out as unknown: a client takes any answer for the promise to do so.
    thread: None = None

    @field_validator("thread", mode="before")
    @classmethod
    def _is_not_kept(cls, thread: Any) -> None:
        if thread is not None:
            raise ValueError("conversations are not kept here; send the whole of it")

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


class CountTokensBody(ConversationFields):
    """What would be asked, without a word on how it is to be answered."""
