"""`POST /v1/messages`, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
from aiohttp import web

from gateway.anthropic.body import CountTokensBody, MessagesBody
from gateway.anthropic.message_format import MessageFormat
from gateway.anthropic.translation import FIELDS, chat_body_of
from gateway.generation import Generation, Prompt
from gateway.openai.admission import Admission, Admitted
from gateway.openai.api import GenerationApi, encode_chat, plan_turn_of_chat
from gateway.openai.attempt import Attempt
from gateway.openai.endpoint import Answer, GenerationEndpoint
from gateway.openai.schema import ChatCompletionBody
from gateway.openai.turn import Speaker, TurnPlan
from gateway.openai.variant_fields import as_variant_asks
from gateway.services import Services
from gateway.text_delta import TextDelta


def _plan_turn(wish: ChatCompletionBody, speaker: Speaker, prompts: Sequence[Prompt]) -> TurnPlan:
    with FIELDS.in_our_words():
        return plan_turn_of_chat(wish, speaker, prompts)


def _encode(wish: ChatCompletionBody, speaker: Speaker, cache_salt: str) -> list[Prompt]:
    with FIELDS.in_our_words():
        return encode_chat(wish, speaker, cache_salt)


MESSAGES = GenerationApi(
    operation="chat",
    id_prefix="msg_",
    prompt_param="messages",
    body=MessagesBody,
    encode=_encode,
    plan_turn=_plan_turn,
    make_format=lambda body, identity: MessageFormat(identity, shows_thinking=body.shows_thinking),
)


class MessagesEndpoint(GenerationEndpoint[MessagesBody, ChatCompletionBody]):
    def __init__(self, services: Services) -> None:
        super().__init__(services, MESSAGES)

    async def _wish(self, admitted: Admitted[MessagesBody]) -> ChatCompletionBody:
        with FIELDS.in_our_words():
            return chat_body_of(admitted.body)

    def _form_param(self, body: ChatCompletionBody) -> str:
        return "output_config.format"

    def _make_answer(
        self,
        attempt: Attempt[MessagesBody, ChatCompletionBody],
        generation: Generation,
    ) -> Answer[MessagesBody, ChatCompletionBody]:
        return _MessageAnswer(self._services, self._api, attempt, generation)


class _MessageAnswer(Answer[MessagesBody, ChatCompletionBody]):
    _has_opened = False

    @property
    def _message(self) -> MessageFormat:
        return cast("MessageFormat", self._format)  # MESSAGES makes no other

    async def whole(self) -> web.Response:
        async for deltas in self._deltas():
            self._message.take(deltas)
        self._observe_end()
        document = self._message.whole([], self._generation.usage)
        return web.Response(
            body=msgspec.json.encode(document), content_type="application/json", headers=self._headers()
        )

    async def _events(self, deltas: list[TextDelta]) -> bytes:
        if self._has_opened:
            return self._message.events(deltas)
        self._has_opened = True
        return self._message.opening_events(self._generation.usage) + self._message.events(deltas)


class CountTokensEndpoint:
    """How long the prompt of a message would be. Counts as a request, for the reason for which `/tokenize`
    does."""

    def __init__(self, services: Services) -> None:
        self._models = {model.name: model for model in services.config.models}
        self._admission = Admission(
            services, CountTokensBody, operation="count_tokens", runner="generate", is_for_engine=False
        )

    async def handle(self, request: web.Request) -> web.Response:
        admitted = await self._admission.admit(request)
        engine = admitted.engine
        speaker = Speaker(engine.tokenizer, engine.card, self._models.get(admitted.variant.model))
        with FIELDS.in_our_words():
            wish = as_variant_asks(chat_body_of(admitted.body), admitted.variant)
        async with self._admission.running(admitted):
            prompts = await admitted.encode(lambda: MESSAGES.encode(wish, speaker, ""))
            MESSAGES.plan_turn(wish, speaker, prompts)  # refuses what a message would be refused for
            document = {"input_tokens": sum(len(prompt.token_ids) for prompt in prompts)}
            return web.Response(
                body=msgspec.json.encode(document),
                content_type="application/json",
                headers=admitted.answer_headers(),
            )
