"""`POST /v1/responses`: a turn of a conversation that the server can remember."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from gateway import long_work
from gateway.errors import ApiError, as_api_error, invalid_request
from gateway.generation import Generation, GenerationPlan, Prompt
from gateway.openai.admission import Admitted
from gateway.openai.answer import AnswerIdentity
from gateway.openai.api import GenerationApi, encode_chat, plan_turn_of_chat
from gateway.openai.attempt import Attempt
from gateway.openai.endpoint import Answer, GenerationEndpoint
from gateway.openai.responses.body import ResponsesBody
from gateway.openai.responses.identity import RESPONSE_PREFIX, fresh_response_id, item_id, response_of_item
from gateway.openai.responses.items import PREFIXES, Item, ItemReference
from gateway.openai.responses.response_format import ResponseFormat
from gateway.openai.responses.store import RESPONSE_TOO_LONG
from gateway.openai.responses.translation import FIELDS, chat_body_of
from gateway.openai.schema import ChatCompletionBody
from gateway.openai.turn import Speaker, TurnPlan
from gateway.request_account import CLIENT_LEFT
from gateway.services import Services
from shared.identifiers import TenantId
from shared.redis_schema import ResponseRecord

logger = logging.getLogger(__name__)

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
AttemptedResponse = Attempt[ResponsesBody, ChatCompletionBody]


@dataclass(frozen=True, slots=True)
class _Conversation:
    """All items up to this turn's answer, which is to have this id."""

    response_id: str
    items: list[Item]


class ResponsesEndpoint(GenerationEndpoint[ResponsesBody, ChatCompletionBody]):
    def __init__(self, services: Services) -> None:
        super().__init__(services, RESPONSES)

    async def _answer(self, attempt: AttemptedResponse) -> web.StreamResponse:
        with FIELDS.in_our_words():
            if not attempt.admitted.body.background:
                return await super()._answer(attempt)
            return await self._begin_in_background(attempt)

    async def _begin_in_background(self, attempt: AttemptedResponse) -> web.StreamResponse:
        if not self._services.responses.is_on:
            raise invalid_request("Responses are not stored here.", "background", "unsupported_value")
        accepted: asyncio.Future[web.StreamResponse] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._make_in_background(accepted, attempt))
        try:
            return await accepted
        except asyncio.CancelledError:  # the client has left without the id
            task.cancel()
            raise

    async def _make_in_background(
        self,
        accepted: asyncio.Future[web.StreamResponse],
        attempt: AttemptedResponse,
    ) -> None:
        """Settles `accepted` with the answer to who asked for it, or with why there is none; then goes on."""
        begun: ResponseAnswer | None = None
        account = attempt.admitted.account
        account.outlives_exchange = True
        status, error_code = 200, None

        async def tell(answer: Answer[ResponsesBody, ChatCompletionBody]) -> None:
            nonlocal begun
            assert isinstance(answer, ResponseAnswer), "_make_answer makes no other"
            if begun is None:
                accepted.set_result(await answer.begin_in_background())
            begun = answer
            await answer.complete_in_background()

        try:
            await self._generate(attempt, tell)
        except asyncio.CancelledError:  # by who has also stored that; or nobody has been told of it
            status = CLIENT_LEFT
            accepted.cancel()
            raise
        except Exception as error:  # whatever it is, who asks for the response is told
            told = as_api_error(error)
            status, error_code = told.status, told.code
            if begun is not None:
                await begun.fail_in_background(error)
            elif not accepted.done():
                accepted.set_exception(error)
        finally:
            self._services.ledger.close(account, status, error_code)

    async def _wish(self, admitted: AdmittedResponse) -> ChatCompletionBody:
        body = admitted.body
        conversation = _Conversation(fresh_response_id(), await self._earlier_items(admitted))
        conversation.items.extend(await self._new_items(admitted, conversation))
        admitted.request[_CONVERSATION] = conversation
        with FIELDS.in_our_words():
            return await long_work.do(
                lambda: chat_body_of(body, conversation.items),
                is_long=len(conversation.items) > LONG_HISTORY_ITEMS,
            )

    async def _plan(
        self,
        admitted: AdmittedResponse,
        body: ChatCompletionBody,
        speaker: Speaker,
        prompts: Sequence[Prompt] | None = None,
    ) -> tuple[TurnPlan, GenerationPlan]:
        num_bytes = sum(len(message.text or "") for message in body.messages)
        with FIELDS.in_our_words():
            return await super()._plan(replace(admitted, num_loaded_bytes=num_bytes), body, speaker, prompts)

    def _make_answer(self, attempt: AttemptedResponse, generation: Generation) -> ResponseAnswer:
        return ResponseAnswer(self._services, RESPONSES, attempt, generation)

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
        status = record.response["status"]
        if status not in ("completed", "incomplete"):
            raise invalid_request(
                f"Previous response with id {previous_id!r} has no answer to go on from: it is {status}.",
                "previous_response_id",
                "previous_response_not_completed",
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
        attempt: AttemptedResponse,
        generation: Generation,
    ) -> None:
        super().__init__(services, api, attempt, generation)
        admitted, wish = attempt.admitted, attempt.wish
        self._conversation: _Conversation = admitted.request[_CONVERSATION]
        self._identity = AnswerIdentity(self._conversation.response_id, admitted.route.name)
        self._account.response_id = self._identity.answer_id
        # A response repeats what is in effect, also where a variant has chosen it.
        told = admitted.body.model_copy(update={"temperature": wish.temperature, "top_p": wish.top_p})
        self._format = self._response = ResponseFormat(told, self._identity, len(self._conversation.items))

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

    async def begin_in_background(self) -> web.Response:
        """Stores it as one that waits, and tells the client so. Raises ApiError if it cannot be stored."""
        response = self._response.queued()
        await self._services.background_responses.begin(self._tenant, self._record(response))
        return web.Response(
            body=msgspec.json.encode(response), content_type="application/json", headers=self._headers()
        )

    async def complete_in_background(self) -> None:
        has_begun = False
        async for deltas in self._deltas():
            if not has_begun:
                has_begun = True
                await self._services.background_responses.note_progress(
                    self._tenant, self._conversation.response_id
                )
            self._response.take(deltas)
            self._account.is_due = True  # the client is told so much, also if the rest fails
        self._observe_end()
        await self._end_in_background(self._response.response(self._generation.usage))

    async def fail_in_background(self, error: Exception) -> None:
        """Stores why there is no more of it."""
        told = as_api_error(error)
        if told.status == 500:
            logger.error("%s failed", self._conversation.response_id, exc_info=error)
        task = asyncio.current_task()
        while task is not None and task.uncancel():  # of a shutdown: there is time for this yet
            pass
        failed = self._response.failed(told)
        if told.code == RESPONSE_TOO_LONG:
            failed["output"] = []
        try:
            await self._end_in_background(failed)
        except ApiError as why:  # told as lost, then, once its lease has run out
            logger.error("how %s ended is not stored: %s", self._conversation.response_id, why)

    async def _end_in_background(self, response: dict[str, Any]) -> None:
        await self._services.background_responses.end(self._tenant, self._record(response))

    async def _store(self) -> None:
        """What cannot be stored is answered all the same, and says of itself that it is not."""
        if self._admitted.body.store:
            record = self._record(self._response.response(self._generation.usage))
            self._response.is_stored = await self._services.responses.put(self._tenant, record)

    def _record(self, response: dict[str, Any]) -> ResponseRecord:
        return ResponseRecord(response, self._conversation.items)

    @property
    def _tenant(self) -> TenantId:
        return TenantId(self._admitted.tenant.name)


def _by_id(items: Iterable[Item]) -> dict[str, Item]:
    return {item["id"]: item for item in items}
