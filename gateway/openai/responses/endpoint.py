"""`POST /v1/responses`: a turn of a conversation that the server can remember."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from gateway import long_work
from gateway.errors import ApiError, invalid_request
from gateway.generation import Generation, GenerationPlan
from gateway.limits import Reservation
from gateway.openai.admission import Admitted
from gateway.openai.answer import AnswerIdentity
from gateway.openai.api import GenerationApi, encode_chat, plan_turn_of_chat
from gateway.openai.endpoint import Answer, GenerationEndpoint
from gateway.openai.responses.body import ResponsesBody
from gateway.openai.responses.identity import RESPONSE_PREFIX, fresh_response_id, item_id, response_of_item
from gateway.openai.responses.items import PREFIXES, Item, ItemReference
from gateway.openai.responses.response_format import ResponseFormat
from gateway.openai.responses.translation import chat_body_of, in_our_words
from gateway.openai.schema import ChatCompletionBody
from gateway.openai.turn import Speaker, TurnPlan
from gateway.services import Services
from shared.errors import UserError
from shared.identifiers import TenantId
from shared.redis_schema import ResponseRecord

RESPONSES = GenerationApi(
    operation="chat",
    id_prefix=RESPONSE_PREFIX,
    prompt_param="input",
    body=ResponsesBody,
    encode=encode_chat,
    plan_turn=plan_turn_of_chat,
    make_format=lambda body, identity: ResponseFormat(body, identity, 0),
)
LONG_HISTORY_ITEMS = 64

_CONVERSATION = "responses.conversation"  # where a request keeps what was loaded for it
AdmittedResponse = Admitted[ResponsesBody]


@dataclass(frozen=True, slots=True)
class _Conversation:
    """All items up to this turn's answer, which is to have this id."""

    response_id: str
    items: list[Item]


class ResponsesEndpoint(GenerationEndpoint[ResponsesBody, ChatCompletionBody]):
    def __init__(self, services: Services) -> None:
        super().__init__(services, RESPONSES)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super().handle(request)
        except (ApiError, UserError) as error:
            raise in_our_words(error) from error

    async def _wish(self, admitted: AdmittedResponse) -> ChatCompletionBody:
        body = admitted.body
        conversation = _Conversation(fresh_response_id(), await self._earlier_items(admitted))
        conversation.items.extend(await self._new_items(admitted, conversation))
        admitted.request[_CONVERSATION] = conversation
        return await long_work.do(
            lambda: chat_body_of(body, conversation.items),
            is_long=len(conversation.items) > LONG_HISTORY_ITEMS,
        )

    async def _plan(
        self, admitted: AdmittedResponse, body: ChatCompletionBody, speaker: Speaker
    ) -> tuple[TurnPlan, GenerationPlan]:
        num_bytes = sum(len(message.text or "") for message in body.messages)
        return await super()._plan(replace(admitted, num_loaded_bytes=num_bytes), body, speaker)

    def _make_answer(
        self,
        admitted: AdmittedResponse,
        wish: ChatCompletionBody,
        turn: TurnPlan,
        generation: Generation,
        reservation: Reservation,
    ) -> ResponseAnswer:
        return ResponseAnswer(self._services, RESPONSES, admitted, wish, turn, generation, reservation)

    async def _earlier_items(self, admitted: AdmittedResponse) -> list[Item]:
        previous_id = admitted.body.previous_response_id
        if previous_id is None:
            return []
        record = await self._services.responses.get(TenantId(admitted.tenant.name), previous_id)
        if record is None:
            raise invalid_request(
                f"Previous response with id {previous_id!r} not found.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return [*record.input_items, *record.response["output"]]

    async def _new_items(self, admitted: AdmittedResponse, conversation: _Conversation) -> list[Item]:
        given = admitted.body.input
        if isinstance(given, str):
            part = {"type": "input_text", "text": given}
            message = {"type": "message", "status": "completed", "role": "user", "content": [part]}
            return self._with_ids([message], conversation)
        referred = await self._referred_items(
            admitted, [item.id for item in given if isinstance(item, ItemReference)], conversation
        )
        items: list[Item] = []
        for item in given:
            if isinstance(item, ItemReference):
                items.append(referred[item.id])
            else:
                items.append(item.stored() if item.id is None else {"id": item.id, **item.stored()})
        return self._with_ids(items, conversation)

    async def _referred_items(
        self, admitted: AdmittedResponse, ids: list[str], conversation: _Conversation
    ) -> dict[str, Item]:
        """Each response is loaded once; the conversation so far may have what is referred to, too."""
        found = _by_id(conversation.items)
        for one in ids:
            response_id = response_of_item(one)
            if one not in found and response_id is not None:
                record = await self._services.responses.get(TenantId(admitted.tenant.name), response_id)
                if record is not None:
                    found |= _by_id([*record.input_items, *record.response["output"]])
            if one not in found:
                raise invalid_request(f"Item with id {one[:128]!r} not found.", "input", "item_not_found")
        return found

    def _with_ids(self, items: list[Item], conversation: _Conversation) -> list[Item]:
        """A client may send items without ids, or one of them twice; lists are paged by them."""
        taken = {item["id"] for item in conversation.items}
        named = []
        for number, item in enumerate(items, len(conversation.items)):
            its_id = item.get("id")
            if its_id is None or its_id in taken:
                its_id = item_id(PREFIXES[item["type"]], conversation.response_id, number)
            taken.add(its_id)
            named.append({**item, "id": its_id})
        return named


class ResponseAnswer(Answer[ResponsesBody, ChatCompletionBody]):
    """As any answer, but stored before the client is told of its end: it may be asked for from then on."""

    def __init__(
        self,
        services: Services,
        api: GenerationApi[ResponsesBody, ChatCompletionBody],
        admitted: AdmittedResponse,
        wish: ChatCompletionBody,
        turn: TurnPlan,
        generation: Generation,
        reservation: Reservation,
    ) -> None:
        super().__init__(services, api, admitted, wish, turn, generation, reservation)
        self._conversation: _Conversation = admitted.request[_CONVERSATION]
        self._identity = AnswerIdentity(self._conversation.response_id, admitted.route.name)
        self._format = self._response = ResponseFormat(
            admitted.body, self._identity, len(self._conversation.items)
        )

    async def whole(self) -> web.Response:
        async for deltas in self._deltas():
            self._response.take(deltas)
        self._observe_end()
        await self._store()
        response = self._response.response(self._generation.usage)
        return web.Response(
            body=msgspec.json.encode(response), content_type="application/json", headers=self._headers()
        )

    async def _closing_events(self) -> bytes:
        await self._store()
        return await super()._closing_events()

    async def _store(self) -> None:
        """What cannot be stored is answered all the same, and says of itself that it is not."""
        if self._admitted.body.store:
            record = ResponseRecord(self._response.response(self._generation.usage), self._conversation.items)
            self._response.is_stored = await self._services.responses.put(
                TenantId(self._admitted.tenant.name), record
            )


def _by_id(items: Iterable[Item]) -> dict[str, Item]:
    return {item["id"]: item for item in items}
