"""What a variant adds to a request: the sampling that its client left open, and a system prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from gateway.openai.chat_message import Message
from gateway.openai.schema import ChatCompletionBody, GenerationBody
from gateway.openai.strict_body import Body
from shared.config import VariantConfig

AskedT = TypeVar("AskedT", bound=Body)

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
)
# Of the others it would be refused for something that its client has not asked for.
_SAMPLING_OF_BEAM_SEARCH = ("seed",)


def as_variant_asks(asked: AskedT, variant: VariantConfig) -> AskedT:
    """The same request with what the variant adds. Nothing that the client has set is changed.

    A default for the length of the answer is not among it: it gives way to the length of the prompt, which
    is not known yet (`sampling_of`).
    """
    added: dict[str, Any] = {}
    if isinstance(asked, GenerationBody):
        added |= _sampling_left_open(asked, variant)
    if isinstance(asked, ChatCompletionBody) and variant.system_prompt is not None:
        added["messages"] = _with_system_prompt(asked.messages, variant.system_prompt)
    return asked.model_copy(update=added) if added else asked


def _sampling_left_open(asked: GenerationBody, variant: VariantConfig) -> dict[str, Any]:
    defaults = variant.sampling
    return {
        name: default
        for name in (_SAMPLING_OF_BEAM_SEARCH if asked.use_beam_search else _SAMPLING)
        if (default := getattr(defaults, name)) is not None
        and (name not in asked.model_fields_set or getattr(asked, name) is None)
    }


def _with_system_prompt(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """In one message with the client's own, if it begins with one: many templates take no second one."""
    first, *rest = messages
    if first.role not in ("system", "developer"):
        return [Message(role="system", content=system_prompt), *messages]
    joined = f"{system_prompt}\n\n{first.text}" if first.text else system_prompt
    return [first.model_copy(update={"content": joined}), *rest]
