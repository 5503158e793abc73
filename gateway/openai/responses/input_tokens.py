"""`POST /v1/responses/input_tokens`: how long the prompt of a response would be, without making it.

Counts as a request, for the reason for which `/tokenize` does.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.openai.attempt import Attempt
from gateway.openai.responses.body import ResponsesBody
from gateway.openai.responses.endpoint import ResponsesEndpoint
from gateway.openai.schema import ChatCompletionBody


class InputTokensEndpoint(ResponsesEndpoint):
    _is_for_engine = False

    async def _answer(self, attempt: Attempt[ResponsesBody, ChatCompletionBody]) -> web.StreamResponse:
        admitted, plan = attempt.admitted, attempt.plan
        async with self._admission.running(admitted):
            num_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
            document = {"object": "response.input_tokens", "input_tokens": num_tokens}
            return web.Response(
                body=msgspec.json.encode(document),
                content_type="application/json",
                headers=admitted.answer_headers(),
            )
