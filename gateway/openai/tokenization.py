"""`POST /tokenize` and `POST /detokenize`: text to tokens and back, just as generation and embedding do it.

No engine works for them. They count as requests nevertheless: the processor that does the work belongs to
all tenants, and what no limit covers one of them could take whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from gateway.errors import invalid_request
from gateway.openai.admission import Admission, Admitted, BodyT
from gateway.openai.api import encode_chat, plan_turn_of_chat
from gateway.openai.sampling import refuse_too_long
from gateway.openai.tokenization_body import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
)
from gateway.openai.turn import Speaker
from gateway.openai.variant_fields import as_variant_asks
from gateway.services import Services


class TokenizeEndpoint:
    def __init__(self, services: Services) -> None:
        self._models = {model.name: model for model in services.config.models}
        self._admission = TokenizeAdmission(
            services, TokenizePromptBody, operation="tokenize", runner=None, is_for_engine=False
        )

    async def handle(self, request: web.Request) -> web.Response:
        admitted = await self._admission.admit(request)
        engine = admitted.engine
        speaker = Speaker(engine.tokenizer, engine.card, self._models.get(admitted.variant.model))
        body = as_variant_asks(admitted.body, admitted.variant)
        return await _answer(self._admission, admitted, lambda: _tokenized(body, speaker))


class TokenizeAdmission(Admission[TokenizeBody]):
    def body_for(self, document: object) -> type[TokenizeBody]:
        is_chat = isinstance(document, dict) and "messages" in document
        return TokenizeChatBody if is_chat else TokenizePromptBody


class DetokenizeEndpoint:
    def __init__(self, services: Services) -> None:
        self._admission = Admission(
            services, DetokenizeBody, operation="detokenize", runner=None, is_for_engine=False
        )

    async def handle(self, request: web.Request) -> web.Response:
        admitted = await self._admission.admit(request)
        return await _answer(self._admission, admitted, lambda: _detokenized(admitted))


async def _answer(
    admission: Admission[BodyT], admitted: Admitted[BodyT], make: Callable[[], dict[str, Any]]
) -> web.Response:
    async with admission.running(admitted):
        document = await admitted.encode(lambda: msgspec.json.encode(make()))
        return web.Response(body=document, content_type="application/json", headers=admitted.answer_headers())


def _tokenized(body: TokenizeBody, speaker: Speaker) -> dict[str, Any]:
    token_ids = _encode(body, speaker)
    spell = speaker.tokenizer.spelling_of_token
    return {
        "count": len(token_ids),
        "max_model_len": speaker.card.max_model_len,
        "tokens": token_ids,
        "token_strs": [spell(token_id) for token_id in token_ids] if body.return_token_strs else None,
    }


def _encode(body: TokenizeBody, speaker: Speaker) -> list[int]:
    """Raises ApiError 400 for a text that no request of this model could hold."""
    if isinstance(body, TokenizeChatBody):
        prompts = encode_chat(body, speaker, "")
        plan_turn_of_chat(body, speaker, prompts)  # it refuses what the model does not serve
        return prompts[0].token_ids
    tokenizer, text = speaker.tokenizer, body.prompt
    refuse_too_long(len(text), tokenizer, speaker.card, "prompt")
    if body.add_special_tokens is False:
        [token_ids] = tokenizer.encode_each([text])
    elif speaker.card.runner == "pooling":
        [token_ids] = tokenizer.encode_whole([text])
    else:
        token_ids = tokenizer.encode(text)
    return token_ids


def _detokenized(admitted: Admitted[DetokenizeBody]) -> dict[str, Any]:
    tokens, vocab_size = admitted.body.tokens, admitted.engine.card.vocab_size
    if tokens and max(tokens) >= vocab_size:
        index = next(index for index, token_id in enumerate(tokens) if token_id >= vocab_size)
        raise invalid_request(f"Token ids must be below {vocab_size}.", f"tokens[{index}]", "invalid_value")
    # With the special tokens: what /tokenize was given comes back whole.
    return {"prompt": admitted.engine.tokenizer.decode(tokens, skip_special_tokens=False)}
