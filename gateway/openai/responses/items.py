"""Items of a conversation as clients send them, and as they are stored: in OpenAI's form, each with an id."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.openai.chat_message import Arguments
from gateway.openai.responses.identity import ItemPrefix
from gateway.openai.strict_body import Body, Label

MAX_PARTS = 1024  # of one message
Item = dict[str, Any]

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# Tags of unions have a character that no field name has: they are no part of what an error names.
_TEXT, _LIST = "form:text", "form:list"


def text_or_list(value: Any) -> str:
    return _TEXT if isinstance(value, str) else _LIST


class TextPart(Body):
    """A piece of text: of the user, of the assistant, or, in Chat's manner, of either."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None  # of output_text, handed back; it has no effect, like the next one
    logprobs: list[Any] | None = None

    @property
    def said(self) -> str:
        return self.text


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def said(self) -> str:
        return self.refusal


class OtherPart(Body):
    """What is not text."""

    @model_validator(mode="before")
    @classmethod
    def _is_refused(cls, document: Any) -> Any:
        kind = document.get("type") if isinstance(document, dict) else None
        if not isinstance(kind, str):
            raise ValueError("it must be an object with a type, such as 'input_text'")
        raise ValueError(f"this model takes text only, no {kind[:64]!r}")

    @property
    def said(self) -> str:
        return ""


def _tag_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("input_text", "output_text", "text"):
        return "part:text"
    return "part:refusal" if kind == "refusal" else "part:other"


Part = Annotated[
    Annotated[TextPart, Tag("part:text")]
    | Annotated[RefusalPart, Tag("part:refusal")]
    | Annotated[OtherPart, Tag("part:other")],
    Discriminator(_tag_of_part),
]
Content = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS), Tag(_LIST)],
    Discriminator(text_or_list),
]


def _said(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.said for part in content)


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Label | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # accepted without effect

    def stored(self) -> Item:
        text = _said(self.content)
        if self.role == "assistant":
            part: Item = {"type": "output_text", "text": text, "annotations": []}
        else:
            part = {"type": "input_text", "text": text}
        return {"type": "message", "status": "completed", "role": self.role, "content": [part]}


class FunctionCallItem(Body):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: Label
    name: Label
    arguments: Arguments
    id: Label | None = None
    status: ItemStatus | None = None
    caller: None = None
    namespace: None = None

    def stored(self) -> Item:
        return {
            "type": "function_call",
            "status": self.status or "completed",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionCallOutputItem(Body):
    """What came of such a call."""

    type: Literal["function_call_output"]
    call_id: Label
    output: Content
    id: Label | None = None
    status: ItemStatus | None = None
    caller: None = None
    namespace: None = None

    def stored(self) -> Item:
        return {
            "type": "function_call_output",
            "status": self.status or "completed",
            "call_id": self.call_id,
            "output": _said(self.output),
        }


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought in an earlier turn."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    id: Label | None = None
    status: ItemStatus | None = None

    def stored(self) -> Item:
        return {
            "type": "reasoning",
            "summary": [part.model_dump() for part in self.summary],
            "content": [part.model_dump() for part in self.content or ()],
        }


class ItemReference(Body):
    """Stands for an item of a stored response, of its input or its output."""

    type: Literal["item_reference"] = "item_reference"
    id: Label


class OtherItem(Body):
    """What only OpenAI's own tools and models make."""

    id: None = None

    @model_validator(mode="before")
    @classmethod
    def _is_refused(cls, document: Any) -> Any:
        kind = document.get("type") if isinstance(document, dict) else None
        if not isinstance(kind, str):
            raise ValueError("it must be a message or another item with a type")
        raise ValueError(f"items of the type {kind[:64]!r} are not supported")

    def stored(self) -> Item:
        raise AssertionError("it is refused at the door")


def _tag_of_item(value: Any) -> str:
    if not isinstance(value, dict):
        return "item:other"
    kind = value.get("type")
    if kind is None:
        return "item:message" if "role" in value else "item:reference" if "id" in value else "item:other"
    return _TAGS.get(kind, "item:other") if isinstance(kind, str) else "item:other"


_TAGS = {
    "message": "item:message",
    "function_call": "item:call",
    "function_call_output": "item:output",
    "reasoning": "item:reasoning",
    "item_reference": "item:reference",
}
InputItem = Annotated[
    Annotated[MessageItem, Tag("item:message")]
    | Annotated[FunctionCallItem, Tag("item:call")]
    | Annotated[FunctionCallOutputItem, Tag("item:output")]
    | Annotated[ReasoningItem, Tag("item:reasoning")]
    | Annotated[ItemReference, Tag("item:reference")]
    | Annotated[OtherItem, Tag("item:other")],
    Discriminator(_tag_of_item),
]
PREFIXES: dict[str, ItemPrefix] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
