"""One message of a chat, as OpenAI documents them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from gateway.openai.strict_body import Body, FieldError, Label

MAX_TOOL_CALLS = 128  # of one message
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]

_NOT_TEXT = {
    "image_url": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
}


class ContentPart(Body):
    """A piece of a message's text."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, document: Any) -> Any:
        kind = document.get("type") if isinstance(document, dict) else None
        if isinstance(kind, str) and kind in _NOT_TEXT:
            raise ValueError(f"this model takes text only, no {_NOT_TEXT[kind]}")
        return document

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ContentPart:
        for name in ("text", "refusal"):
            if (getattr(self, name) is not None) != (self.type == name):
                raise FieldError(name, f"it goes with the type {name!r}, and that needs it")
        return self

    @property
    def said(self) -> str:
        return self.text or self.refusal or ""


def _check_arguments(arguments: str) -> str:
    """Templates write the arguments in forms of their own, so they have to be taken apart."""
    try:
        is_object = isinstance(json.loads(arguments or "{}"), dict)
    except json.JSONDecodeError as error:
        raise ValueError(f"the text is not valid JSON: {error}") from error
    except (ValueError, RecursionError) as error:  # whose words are about the interpreter
        raise ValueError("the text is nested too deeply, or has too long a number") from error
    if not is_object:
        raise ValueError("the text must be a JSON object")
    return arguments


Arguments = Annotated[str, AfterValidator(_check_arguments)]


class CalledFunction(Body):
    name: FunctionName
    arguments: Arguments


class AssistantToolCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        arguments = json.loads(self.function.arguments or "{}")
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(min_length=1)] | None = None
    name: Label | None = None
    refusal: str | None = None
    # of the assistant: what it called, and what it thought, under either of vLLM's names
    tool_calls: Annotated[list[AssistantToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # of a tool: which call this is the result of
    tool_call_id: Label | None = None
    # what clients copy from the answers of others
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Message:
        if self.role == "tool" and self.tool_call_id is None:
            raise FieldError("tool_call_id", "a message of a tool says which call it is the result of")
        if self.role != "tool" and self.tool_call_id is not None:
            raise FieldError("tool_call_id", "it goes with the role 'tool'")
        if self.role != "assistant":
            for name in ("tool_calls", "refusal", "reasoning_content", "reasoning"):
                if getattr(self, name):
                    raise FieldError(name, "it goes with the role 'assistant'")
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("a message needs content")
        return self

    @property
    def text(self) -> str | None:
        if self.content is None:
            return self.refusal
        return self.content if isinstance(self.content, str) else "".join(part.said for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: parts joined, the newer role name as the older one."""
        role = "system" if self.role == "developer" else self.role
        # Not None, of a message that only calls tools: some templates add to the text without a look at it.
        fields: dict[str, Any] = {"role": role, "content": self.text or ""}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning_content or self.reasoning:
            fields["reasoning_content"] = reasoning
        return fields
