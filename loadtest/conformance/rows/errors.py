"""What is wrong is refused in OpenAI's shape, with the field named."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.check import check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

CHAT = "/v1/chat/completions"
FALLBACK_WORDS = 400_000


async def check_named(server: Server, param: str, **fields: Any) -> None:
    (await server.chat(**fields)).refused(400, param=param)


async def check_not_dropped(server: Server, param: str, **fields: Any) -> None:
    answer = await server.chat(max_tokens=1, **fields)
    if answer.status == 200:
        told = answer.headers.get("x-headrace-ignored", "")
        check(param in told.split(", "), f"it is silently ignored: x-headrace-ignored is {told!r}")
    else:
        answer.refused(400, param=param)


@row
async def what_is_not_json_is_refused(server: Server) -> None:
    """Bodies that are no JSON are 400."""
    for body in (b"", b"{", b'{"model": "x"} tail', b"\xff\xfe", b'{"temperature": NaN}'):
        (await server.post(CHAT, body)).refused(400)


@row
async def what_is_no_object_is_refused(server: Server) -> None:
    """JSON that is no object is 400."""
    for body in (b"[]", b"1", b"null", b'"x"'):
        (await server.post(CHAT, body)).refused(400)


@row
async def deep_nesting_is_refused(server: Server) -> None:
    """100,000 open brackets are a 400, not a crash."""
    (await server.post(CHAT, b"[" * 100_000)).refused(400)


@row
async def a_wrong_type_is_named(server: Server) -> None:
    """A value of the wrong type is a 400 of its field."""
    for name, value in (("temperature", "hot"), ("max_tokens", "4"), ("stream", "yes"), ("messages", "hi")):
        await check_named(server, name, **{name: value})


@row
async def a_value_out_of_range_is_named(server: Server) -> None:
    """temperature 3, top_p 2, n 0 and max_tokens -1 are a 400 of their field."""
    for name, value in (("temperature", 3), ("top_p", 2), ("n", 0), ("max_tokens", -1)):
        await check_named(server, name, **{name: value})


@row
async def huge_integers_are_named(server: Server) -> None:
    """Integers beyond 64 bits, or of thousands of digits, are a 400 of their field."""
    for name, value in (("seed", 2**64), ("max_tokens", 2**63), ("n", 10**9)):
        await check_named(server, name, **{name: value})
    text = json.dumps(server.chat_body(seed=0)).replace('"seed": 0', '"seed": ' + "9" * 5000)
    (await server.post(CHAT, text.encode())).refused(400)


@row
async def half_a_surrogate_pair_is_named(server: Server) -> None:
    """Text that no encoding has is a 400 of the field it is in."""
    body = json.dumps(server.chat_body(messages=[{"role": "user", "content": "\ud800"}])).encode()
    (await server.post(CHAT, body)).refused(400, param="messages")


@row
async def odd_text_is_no_fault_of_the_servers(server: Server) -> None:
    """NUL, a byte order mark, and characters that are none are text, or a 400 of the field they are in."""
    for text in ("a\x00b", "\ufeffa", "a\uffff\ufdd0b", "\U0010ffff", ""):
        answer = await server.chat(messages=[{"role": "user", "content": text}], max_tokens=1)
        if answer.status != 200:
            answer.refused(400, param="messages")


@row
async def an_unknown_field_is_not_dropped(server: Server) -> None:
    """A field that does not exist is refused by name, or told as ignored in x-headrace-ignored."""
    await check_not_dropped(server, "frobnicate", frobnicate=1)


@row
async def an_unknown_field_inside_is_not_dropped(server: Server) -> None:
    """A field of a message that does not exist is refused by name, or told as ignored."""
    messages = [{"role": "user", "content": "hi", "frobnicate": 1}]
    await check_not_dropped(server, "messages[0].frobnicate", messages=messages)


@row
async def an_unknown_role_is_named(server: Server) -> None:
    """A role that does not exist is a 400 of that message."""
    await check_named(server, "messages", messages=[{"role": "wizard", "content": "hi"}])


@row
async def messages_are_required(server: Server) -> None:
    """No messages, or none in the list, are a 400 of messages."""
    (await server.post(CHAT, {"model": server.model})).refused(400, param="messages")
    await check_named(server, "messages", messages=[])


@row
async def a_model_is_required(server: Server) -> None:
    """A body without model is a 400 of model."""
    body = server.chat_body()
    del body["model"]
    (await server.post(CHAT, body)).refused(400, param="model")


@row
async def an_unknown_model_is_not_found(server: Server) -> None:
    """A model that does not exist is 404 model_not_found."""
    (await server.chat(model="no/such model")).refused(404, code="model_not_found")


@row
async def a_wrong_key_is_refused(server: Server) -> None:
    """A wrong or missing key is 401 invalid_api_key."""
    await server.needs_keys()
    for key in ("wrong-key", None):
        (await server.post(CHAT, server.chat_body(), key=key)).refused(401, code="invalid_api_key")


@row
async def a_key_is_never_repeated(server: Server) -> None:
    """The message of a 401 does not hold the key that was sent."""
    await server.needs_keys()
    answer = await server.get("/v1/models", key="sk-secret-0123456789abcdef")
    check(b"0123456789abcdef" not in answer.body, "the key is in the answer")


@row
async def an_unknown_route_is_not_found(server: Server) -> None:
    """A path that does not exist is 404 in OpenAI's shape, whatever the method."""
    for method, path in (("GET", "/v1/no-such-route"), ("GET", "/nothing"), ("POST", "/v1/chat/nothing"),
                         ("DELETE", "/v1/no-such-route")):  # fmt: skip
        (await server.send(method, path)).refused(404)


@row
async def a_wrong_method_is_not_allowed(server: Server) -> None:
    """A method that a path does not have is 405 in OpenAI's shape, and Allow has the right one."""
    for method, path, allowed in (
        ("GET", CHAT, "POST"),
        ("DELETE", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
    ):
        answer = await server.send(method, path)
        answer.refused(405)
        check(allowed in answer.headers.get("allow", ""), f"Allow is {answer.headers.get('allow')!r}")


@row
async def a_query_changes_nothing(server: Server) -> None:
    """Some clients add a query such as ?beta=true to every path."""
    for answer in (
        await server.get("/v1/models?beta=true"),
        await server.post(f"{CHAT}?beta=true", server.chat_body(max_tokens=1)),
    ):
        check_equal(answer.status, 200, "status")


@row
async def a_wrong_content_type_is_refused(server: Server) -> None:
    """A body that does not call itself JSON is 415."""
    headers = {"Content-Type": "text/plain"}
    (await server.post(CHAT, json.dumps(server.chat_body()).encode(), headers=headers)).refused(415)


@row
async def a_large_body_is_refused_before_it_comes(server: Server) -> None:
    """A Content-Length of ten gigabytes is 413 at once."""
    async with server.connection() as connection:
        await connection.send(server.raw_request("POST", CHAT, headers={"Content-Length": str(10**10)}))
        (await connection.read_answer()).refused(413)


@row
async def a_prompt_beyond_the_context_is_refused(server: Server) -> None:
    """Too long a prompt is 400 context_length_exceeded."""
    num_words = server.target.max_model_len or FALLBACK_WORDS
    messages = [{"role": "user", "content": "word " * num_words}]
    (await server.chat(messages=messages)).refused(400, code="context_length_exceeded")


@row
async def too_many_tokens_are_refused(server: Server) -> None:
    """A max_tokens that no context has is a 400."""
    (await server.chat(max_tokens=2**31 - 1)).refused(400)


@row
async def it_says_whether_to_try_again(server: Server) -> None:
    """What can never work has x-should-retry false, which the official clients obey."""
    for answer in (await server.chat(model="no-such-model"), await server.chat(temperature="hot")):
        check_equal(answer.headers.get("x-should-retry"), "false", "x-should-retry")
