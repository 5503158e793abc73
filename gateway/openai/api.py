"""The generating endpoints: what they differ in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gateway.affinity import conversation_hash, prompt_hash
from gateway.errors import invalid_request
from gateway.generation import Prompt
from gateway.openai.answer import AnswerFormat, AnswerIdentity
from gateway.openai.chat_format import ChatFormat
from gateway.openai.chat_turn import plan_chat_turn
from gateway.openai.completion_format import CompletionFormat
from gateway.openai.conversation import Conversation
from gateway.openai.sampling import check_token_ids, refuse_too_long
from gateway.openai.schema import ChatCompletionBody, CompletionBody, GenerationBody, StreamableBody
from gateway.openai.tools.tool_prompt import described, with_tools_as_text
from gateway.openai.turn import Speaker, TurnPlan
from gateway.prompt_answer import Echo
from shared.tokenizer import Tokenizer

BodyT = TypeVar("BodyT", bound=StreamableBody)
WishT = TypeVar("WishT", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class GenerationApi(Generic[BodyT, WishT]):
    """One endpoint: `body` is what clients send, the wish what that asks of a model. The two are the same
    where the body is OpenAI's for completions.

    `encode` may take long for long prompts and runs off the event loop then.
    """

    operation: str  # gen_ai.operation.name
    id_prefix: str
    prompt_param: str
    body: type[BodyT]
    encode: Callable[[WishT, Speaker, str], list[Prompt]]  # the last one is the cache salt
    plan_turn: Callable[[WishT, Speaker, Sequence[Prompt]], TurnPlan]
    make_format: Callable[[BodyT, AnswerIdentity], AnswerFormat]


def encode_conversation(
    conversation: Conversation, speaker: Speaker, cache_salt: str, param: str
) -> list[Prompt]:
    """`param`: the field that holds the messages."""
    card, variables = speaker.card, conversation.template_variables
    tools = [described(tool) for tool in conversation.callable_tools]
    tools_text = json.dumps(tools) if tools else ""
    refuse_too_long(len(tools_text), speaker.tokenizer, card, "tools")
    messages = conversation.messages
    num_characters = sum(len(message["content"] or "") for message in messages)
    refuse_too_long(num_characters + len(tools_text), speaker.tokenizer, card, param)
    if not speaker.tokenizer.chat_template.takes_tools:
        messages = with_tools_as_text(messages, tools)
    token_ids = speaker.tokenizer.encode_chat(
        messages,
        tools=tools or None,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=variables,
        owner=cache_salt,
    )
    if not token_ids:
        raise invalid_request("The prompt has no tokens.", param, "invalid_value")
    if len(token_ids) < card.block_size:
        return [Prompt(token_ids, None)]
    # Variables and tools change how a prompt begins, so they are a part of what its blocks are found by.
    told_apart = cache_salt
    if variables or tools:
        told_apart += f"\n{json.dumps(variables, sort_keys=True)}\n{tools_text}"
    return [Prompt(token_ids, conversation_hash(told_apart, messages))]


def encode_chat(body: ChatCompletionBody, speaker: Speaker, cache_salt: str) -> list[Prompt]:
    return encode_conversation(body.conversation, speaker, cache_salt, "messages")


def plan_turn_of_chat(body: ChatCompletionBody, speaker: Speaker, prompts: Sequence[Prompt]) -> TurnPlan:
    [prompt] = prompts
    return plan_chat_turn(body, speaker, prompt)


def _encode_completion(body: CompletionBody, speaker: Speaker, cache_salt: str) -> list[Prompt]:
    tokenizer, card, prompt = speaker.tokenizer, speaker.card, body.prompt
    given: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(given[0], int):
        given = [given]
    for one in given:
        if isinstance(one, str):
            refuse_too_long(len(one), tokenizer, card, "prompt")
    token_id_lists = [tokenizer.encode(one) if isinstance(one, str) else one for one in given]
    # A model without a bos token makes nothing of an empty text; there is nothing to continue from.
    if any(not token_ids for token_ids in token_id_lists):
        raise invalid_request("A prompt needs at least one token.", "prompt", "invalid_value")
    check_token_ids(token_id_lists, card)
    return [
        Prompt(
            token_ids,
            prompt_hash(cache_salt, token_ids) if len(token_ids) >= card.block_size else None,
            _echo_of(one, tokenizer) if body.echo else None,
        )
        for one, token_ids in zip(given, token_id_lists, strict=True)
    ]


def _echo_of(prompt: str | list[int], tokenizer: Tokenizer) -> Echo:
    if isinstance(prompt, str):
        return Echo(prompt, tokenizer.num_added_tokens)
    return Echo(tokenizer.decode(prompt, skip_special_tokens=False), 0)


CHAT_COMPLETIONS = GenerationApi(
    operation="chat",
    id_prefix="chatcmpl-",
    prompt_param="messages",
    body=ChatCompletionBody,
    encode=encode_chat,
    plan_turn=plan_turn_of_chat,
    make_format=lambda body, identity: ChatFormat(
        identity,
        includes_usage=body.includes_usage,
        tells_token_ids=body.return_token_ids,
        names_tool=body.only_tool is not None,
    ),
)
COMPLETIONS = GenerationApi(
    operation="text_completion",
    id_prefix="cmpl-",
    prompt_param="prompt",
    body=CompletionBody,
    encode=_encode_completion,
    plan_turn=lambda body, _speaker, _prompts: TurnPlan(
        body.form, skip_special_tokens=body.skip_special_tokens
    ),
    make_format=lambda body, identity: CompletionFormat(
        identity, includes_usage=body.includes_usage, tells_token_ids=body.return_token_ids
    ),
)
