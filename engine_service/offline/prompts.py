"""The forms in which a caller can hand over prompts and conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shared.errors import InvalidRequest
from shared.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    text: str | None  # None: it came as token ids
    token_ids: list[int]


def list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, in any of its forms, or several: always several. Raises TypeError."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [prompts]  # type: ignore[list-item]  # a list of int is a prompt, which mypy cannot see
    if isinstance(prompts, Sequence):
        return list(prompts)  # type: ignore[arg-type]  # each is looked at when it is encoded
    raise TypeError(f"prompts must be a str, a dict or a list of them, not {type(prompts).__name__}")


def list_of_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several: always several. Raises ValueError when there is nothing to answer."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]  # as above
    return list(messages)  # type: ignore[arg-type]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> EncodedPrompt:
    """What is to be continued. Raises TypeError or ValueError."""
    return _encode(prompt, tokenizer.encode)


def encode_text(prompt: Prompt, tokenizer: Tokenizer) -> EncodedPrompt:
    """What is to be embedded, so with the special tokens at its ends. Raises TypeError or ValueError."""
    return _encode(prompt, lambda text: tokenizer.encode_whole([text])[0])


def _encode(prompt: Prompt, encode: Callable[[str], list[int]]) -> EncodedPrompt:
    if isinstance(prompt, Mapping):
        if set(prompt) - {"prompt", "prompt_token_ids"} or not prompt:
            raise ValueError(f"expected the key prompt or prompt_token_ids, got {sorted(prompt)}")
        token_ids = prompt.get("prompt_token_ids")
        text = prompt.get("prompt")
        if token_ids is None:
            return _encode(text, encode)  # type: ignore[arg-type]  # checked there
        return EncodedPrompt(text, list(_encode(token_ids, encode).token_ids))
    if isinstance(prompt, str):
        return EncodedPrompt(prompt, encode(prompt))
    if _is_token_ids(prompt):
        return EncodedPrompt(None, list(prompt))
    raise TypeError(f"expected a str, a dict or a list of token ids, got {type(prompt).__name__}")


def encode_conversation(messages: Conversation, tokenizer: Tokenizer) -> EncodedPrompt:
    """Up to where the assistant answers. Raises TypeError or ValueError."""
    try:
        token_ids = tokenizer.encode_chat([_for_template(message) for message in messages])
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return EncodedPrompt(tokenizer.decode(token_ids, skip_special_tokens=False), token_ids)


def _for_template(message: Message) -> dict[str, Any]:
    """The message as chat templates expect it: text parts joined, the newer role name as the older one."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message must be a dict, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise ValueError("a message needs a role")
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": _text_of(message.get("content"))}


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError("a message needs content: a str, or a list of text parts")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part["text"], str):
            raise ValueError("only parts of the type 'text' can be in a message's content")
        parts.append(part["text"])
    return "".join(parts)


def _is_token_ids(prompt: object) -> bool:
    """An empty list is none: there would be nothing to continue from, and `generate([])` is no request."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt)
    )
