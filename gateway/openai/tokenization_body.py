"""The bodies of /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gateway.openai.schema import ChatCompletionBody, ModelBody, TokenId

MAX_TOKENS = 2**18  # to be made text of: more than the longest contexts


class TokenizePromptBody(ModelBody):
    prompt: str
    add_special_tokens: bool | None = None  # None: yes, as a completion has them
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatCompletionBody):
    """With every field of a chat completion, so that a client can have the very request counted that it is
    going to send."""

    # The chat template writes them itself: a second bos token would be a prompt that no chat has.
    add_special_tokens: Literal[False] | None = None
    return_token_strs: bool | None = None


TokenizeBody = TokenizePromptBody | TokenizeChatBody


class DetokenizeBody(ModelBody):
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
