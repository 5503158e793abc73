"""What is asked of a chat model, in whichever of the chat endpoints' forms it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ToolChoice = Literal["none", "auto", "required"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# What a template is told of a conversation; a client's own variables leave these alone.
RESERVED_TEMPLATE_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: it takes none
    is_strict: bool = False  # arguments have to satisfy the schema


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages are as chat templates expect them: `role` and `content` (text), and with assistant messages
    that call tools `tool_calls`, whose arguments are objects."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    only_tool: str | None = None  # the one that must be called; with the choice "required"
    parallel_tool_calls: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tells_reasoning: bool = True  # False: what the model thinks is left out of the answer

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """A model that must not call any is not told of them: then it cannot."""
        return () if self.tool_choice == "none" else self.tools
