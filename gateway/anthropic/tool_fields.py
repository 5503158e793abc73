"""Tools as clients of this API describe them, and which of them they want used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gateway.anthropic.blocks import CacheControl
from gateway.openai.chat_message import FunctionName
from gateway.openai.strict_body import Body, FieldError

MAX_TOOLS = 128


class ClientTool(Body):
    """A tool that the client runs. Those that Anthropic's servers run are refused by their name."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # about how Anthropic's servers call tools: their defaults are what is done here
    allowed_callers: Annotated[list[Literal["direct"]], Field(min_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_run_by_the_client(cls, document: Any) -> Any:
        kind = document.get("type") if isinstance(document, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise FieldError(
                "type", f"the tool {kind[:64]!r} is not served, only tools of the type 'custom' are"
            )
        return document

    @field_validator("input_schema")
    @classmethod
    def _is_of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type", "object") != "object":
            raise ValueError("the schema must be that of an object")
        return schema


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_the_tool_that_it_means(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise FieldError("name", "it goes with the type 'tool', and that needs it")
        return self
