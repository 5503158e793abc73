"""What a message is made of, as Anthropic documents it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from gateway.openai.chat_message import FunctionName
from gateway.openai.strict_body import Body, FieldError, Label

_NOT_TEXT = {"image": "images", "document": "documents", "search_result": "search results"}


class CacheControl(Body):
    """Accepted without effect: whatever can be cached is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    """What the model thought in an earlier turn. `signature`: ours have none, others' say nothing to us."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Label
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


def _refuse_what_is_not_text(document: Any) -> Any:
    """In words of its own: the list of what would have been right says nothing about what this is."""
    kind = document.get("type") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        raise ValueError("a content block must be an object with a type")
    if kind in _NOT_TEXT:
        raise ValueError(f"this model takes text only, no {_NOT_TEXT[kind]}")
    if kind == "redacted_thinking":
        raise ValueError("redacted thinking can be read only by the service that made it")
    if kind not in _TAGS:
        raise ValueError(f"content blocks of the type {kind[:64]!r} are not served")
    return document


def _tag_of(document: Any) -> str | None:
    """Written like a type, which `check_body` leaves out of a field's name."""
    kind = document.get("type") if isinstance(document, dict) else None
    return f"block[{kind}]"


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: str | list[Annotated[TextBlock, BeforeValidator(_refuse_what_is_not_text)]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(block.text for block in self.content)
        return self.content or ""


_TAGS = ("text", "thinking", "tool_use", "tool_result")
Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
AnyBlock = Annotated[
    Annotated[TextBlock, Tag("block[text]")]
    | Annotated[ThinkingBlock, Tag("block[thinking]")]
    | Annotated[ToolUseBlock, Tag("block[tool_use]")]
    | Annotated[ToolResultBlock, Tag("block[tool_result]")],
    Discriminator(_tag_of),
    BeforeValidator(_refuse_what_is_not_text),
]
_ROLES_OF = {
    "text": ("user", "assistant", "system"),
    "thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
}


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]

    @model_validator(mode="after")
    def _says_what_its_role_may(self) -> Message:
        for index, block in enumerate(self.blocks):
            if self.role not in _ROLES_OF[block.type]:
                role = _ROLES_OF[block.type][0]
                raise FieldError(f"content[{index}]", f"a {block.type} block goes with the role {role!r}")
        return self

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if block.type == "text")
