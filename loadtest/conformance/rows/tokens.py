"""`POST /tokenize` and `/detokenize`: vLLM's."""

from __future__ import annotations

from typing import Any

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable, check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.rows.streams import LIKE_FRAMING, MANY_SCRIPTS
from loadtest.conformance.server import Server


async def tokenize(server: Server, **fields: Any) -> Answer:
    return await server.post("/tokenize", {"model": server.model, **fields})


async def tokens_of(server: Server, **fields: Any) -> list[int]:
    """Raises NotApplicable where the route is another one of that name."""
    document = (await tokenize(server, **fields)).ok().json
    if "count" not in document:
        raise NotApplicable("/tokenize does not answer as vLLM's")
    tokens: list[int] = document["tokens"]
    return tokens


async def text_of(server: Server, tokens: list[int]) -> str:
    answer = await server.post("/detokenize", {"model": server.model, "tokens": tokens})
    return str(answer.ok().json["prompt"])


@row
async def answer_has_the_shape(server: Server) -> None:
    """tokens are integers, count is their number, max_model_len the length of a context."""
    tokens = await tokens_of(server, prompt="Once upon a time")
    document = (await tokenize(server, prompt="Once upon a time")).ok().json
    check(tokens and all(type(token) is int and token >= 0 for token in tokens), f"tokens are {tokens}")
    check_equal(document["count"], len(tokens), "count")
    check(document["max_model_len"] > 0, f"max_model_len is {document['max_model_len']!r}")


@row
async def a_prompt_has_the_tokens_of_its_completion(server: Server) -> None:
    """The tokens of a text are as many as a completion's usage tells, and lead to the same answer."""
    tokens = await tokens_of(server, prompt="Once upon a time")
    by_text = (await server.complete()).ok().json
    by_tokens = (await server.complete(prompt=tokens)).ok().json
    check_equal(len(tokens), by_text["usage"]["prompt_tokens"], "the number of tokens")
    check_equal(by_tokens["choices"][0]["text"], by_text["choices"][0]["text"], "the text")


@row
async def a_chat_has_the_tokens_of_its_completion(server: Server) -> None:
    """The tokens of messages are as many as the chat's usage tells."""
    messages = server.chat_body()["messages"]
    tokens = await tokens_of(server, messages=messages)
    usage = (await server.chat(max_tokens=1)).ok().json["usage"]
    check_equal(len(tokens), usage["prompt_tokens"], "the number of tokens")


@row
async def no_generation_prompt_on_request(server: Server) -> None:
    """add_generation_prompt false leaves out the begin of the assistant's turn."""
    messages = server.chat_body()["messages"]
    whole = await tokens_of(server, messages=messages, add_generation_prompt=True)
    without = await tokens_of(server, messages=messages, add_generation_prompt=False)
    if whole == without:
        raise NotApplicable("this model's turns begin with nothing")
    check_equal(whole[: len(without)], without, "the begin of the tokens")


@row
async def tokens_become_the_text_that_they_were(server: Server) -> None:
    """Whatever the script, /detokenize gives back what /tokenize was given."""
    for text in (MANY_SCRIPTS, LIKE_FRAMING):
        tokens = await tokens_of(server, prompt=text, add_special_tokens=False)
        check_equal(await text_of(server, tokens), text, "the text")


@row
async def spellings_come_only_if_asked_for(server: Server) -> None:
    """return_token_strs gives each token's spelling; without it there is none."""
    await tokens_of(server, prompt="x")  # the route is there
    plain = (await tokenize(server, prompt="Once upon a time")).ok().json
    check_equal(plain.get("token_strs"), None, "token_strs")
    asked = (await tokenize(server, prompt="Once upon a time", return_token_strs=True)).ok("token_strs").json
    check_equal(len(asked["token_strs"] or ()), asked["count"], "the number of spellings")


@row
async def a_token_that_is_none_is_refused(server: Server) -> None:
    """Ids beyond the vocabulary are a 400, as are negative ones."""
    await tokens_of(server, prompt="x")  # the routes are there
    await text_of(server, [40, 41])
    for token in (2**31 - 1, -1):
        answer = await server.post("/detokenize", {"model": server.model, "tokens": [40, token]})
        answer.refused(400)


@row
async def a_text_is_required(server: Server) -> None:
    """Neither prompt nor messages is a 400."""
    await tokens_of(server, prompt="x")  # the route is there
    (await tokenize(server)).refused(400)


@row
async def an_unknown_model_is_not_found(server: Server) -> None:
    """A model that there is not is a 404."""
    await tokens_of(server, prompt="x")  # the route is there
    answer = await server.post("/tokenize", {"model": "no-such-model", "prompt": "x"})
    answer.refused(404, code="model_not_found")
