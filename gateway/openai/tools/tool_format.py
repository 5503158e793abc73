"""The ways in which models write calls of tools, and which one a model has."""

from __future__ import annotations

import functools
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gateway.openai.tools.call_grammar import (
    CallWriter,
    hermes_calls,
    llama3_json_calls,
    mistral_list_calls,
    mistral_named_calls,
    pythonic_calls,
)
from gateway.openai.tools.call_parser import CallParser
from gateway.openai.tools.hermes import HermesParser
from gateway.openai.tools.llama3_json import Llama3JsonParser
from gateway.openai.tools.mistral import MistralParser
from gateway.openai.tools.pythonic import PythonicParser
from shared.chat_template import ChatTemplate
from shared.config import ToolCallParser

_CALL_ID_LENGTH = 24
_MISTRAL_ID_LENGTH = 9  # its templates refuse others
_ALPHABET = string.ascii_letters + string.digits


def _fresh_call_id() -> str:
    return "call_" + _random_text(_CALL_ID_LENGTH)


def _fresh_mistral_id() -> str:
    return _random_text(_MISTRAL_ID_LENGTH)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    make_parser: Callable[[Collection[str]], CallParser]  # of the names of the tools
    calls: CallWriter
    markers: tuple[str, ...]  # that the parser goes by, and that may be special tokens
    fresh_call_id: Callable[[], str] = _fresh_call_id


HERMES = ToolFormat(HermesParser, hermes_calls, ("<tool_call>", "</tool_call>"))
LLAMA3_JSON = ToolFormat(Llama3JsonParser, llama3_json_calls, ("<|python_tag|>",))
MISTRAL_LIST = ToolFormat(
    MistralParser, mistral_list_calls, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _fresh_mistral_id
)
MISTRAL_NAMED = ToolFormat(
    MistralParser, mistral_named_calls, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _fresh_mistral_id
)
PYTHONIC = ToolFormat(
    PythonicParser, pythonic_calls, ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
)


def tool_format(parser: ToolCallParser | None, template: ChatTemplate) -> ToolFormat | None:
    """`parser` as in ModelConfig. None: the model cannot call tools, or in no way that is known."""
    parser = parser or _parser_of(template.source, template.takes_tools)
    if parser == "mistral":
        return MISTRAL_NAMED if "[ARGS]" in template.source else MISTRAL_LIST
    return {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "pythonic": PYTHONIC, "none": None}[parser]


@functools.lru_cache(maxsize=64)
def _parser_of(template_source: str, takes_tools: bool) -> ToolCallParser:
    """As the template tells the model to write calls, or writes those of earlier turns."""
    if not takes_tools:
        return "hermes"  # we tell it ourselves, see tool_prompt.py
    if "[TOOL_CALLS]" in template_source:
        return "mistral"
    if "<tool_call>" in template_source:
        return "none" if "<function=" in template_source else "hermes"  # Qwen3-Coder's own form is not known
    if "<|python_start|>" in template_source or re.search(r"\[\w+\(\w+=", template_source):
        return "pythonic"
    if "<|python_tag|>" in template_source or '"parameters":' in template_source:
        return "llama3_json"
    return "none"


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
