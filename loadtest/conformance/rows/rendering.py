"""`POST .../render`: what a completion would send to the model (vLLM's)."""

from __future__ import annotations

from typing import Any

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.rows.completions import IDS
from loadtest.conformance.server import Server

CHAT = "/v1/chat/completions/render"
COMPLETION = "/v1/completions/render"


async def render_chat(server: Server, **fields: Any) -> Answer:
    return await server.post(CHAT, server.chat_body(**fields))


async def render(server: Server, **fields: Any) -> Answer:
    return await server.post(COMPLETION, server.completion_body(**fields))


@row
async def a_chat_has_its_tokens(server: Server) -> None:
    """token_ids are those of the chat: as many as usage tells, and with the same answer."""
    token_ids = (await render_chat(server)).ok().json["token_ids"]
    chat = (await server.chat()).ok().json
    check_equal(len(token_ids), chat["usage"]["prompt_tokens"], "the number of tokens")
    completion = (await server.complete(prompt=token_ids)).ok().json
    check_equal(completion["choices"][0]["text"], chat["choices"][0]["message"]["content"], "the answer")


@row
async def sampling_parameters_are_told(server: Server) -> None:
    """sampling_params hold what was asked for, under vLLM's names."""
    asked: dict[str, Any] = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "seed": 3, "stop": ["x"]}
    told = (await render_chat(server, **asked)).ok().json["sampling_params"]
    check_equal({name: told.get(name) for name in asked}, asked, "sampling_params")


@row
async def each_prompt_is_a_request(server: Server) -> None:
    """Of several prompts of a completion each is told, in order; ids stay what they are."""
    told = (await render(server, prompt=[IDS, IDS[:2]])).ok().json
    check_equal([each["token_ids"] for each in told], [IDS, IDS[:2]], "the tokens")


@row
async def nothing_is_generated(server: Server) -> None:
    """A rendered request has no choices and no usage, whether it would be a stream or not."""
    for fields in ({}, {"stream": True}):
        document = (await render_chat(server, **fields)).ok().json
        check(not {"choices", "usage"} & set(document), f"it has {sorted(document)}")


@row
async def what_is_wrong_is_refused_as_ever(server: Server) -> None:
    """Wrong fields and unknown models are refused as those of the real request."""
    for path, ask in ((CHAT, render_chat), (COMPLETION, render)):
        (await ask(server)).ok()  # the route is there
        (await ask(server, temperature="hot")).refused(400, param="temperature")
        answer = await ask(server, model="no-such-model")
        check_equal(answer.status, 404, f"the status of an unknown model at {path}")
        answer.refused(404, code="model_not_found")
