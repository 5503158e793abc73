"""Tools as clients describe them, and which of them they want called."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from gateway.openai.chat_message import FunctionName
from gateway.openai.conversation import Tool
from gateway.openai.strict_body import Body, FieldError

MAX_TOOLS = 128


class FunctionDefinition(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionDefinition:
        if self.parameters is not None and self.parameters.get("type", "object") != "object":
            raise FieldError("parameters", "the schema must be that of an object")
        return self


class FunctionTool(Body):
    type: Literal["function"]
    function: FunctionDefinition

    @property
    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction
