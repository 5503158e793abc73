"""Anthropic's Python client, unchanged: what it makes of `/v1/messages`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from loadtest.conformance.check import CheckFailed, NotApplicable, check, check_equal
from loadtest.conformance.client_library import TIMEOUT_S, client_library, refusals_told
from loadtest.conformance.row import row
from loadtest.conformance.rows.tools import FUNCTIONS, check_arguments
from loadtest.conformance.rows.tools import QUESTION as ABOUT_WEATHER
from loadtest.conformance.server import QUESTION, Server

OLDEST = (0, 50)
PATH = "/v1/messages"
ROOM = 300  # tokens: enough for a call of the tools
TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
    for each in FUNCTIONS
]


async def anthropic_library() -> ModuleType:
    return await client_library("anthropic", OLDEST)


@asynccontextmanager
async def anthropic_client(
    server: Server, path: str = PATH, feature: str | None = None
) -> AsyncIterator[Any]:
    """An `AsyncAnthropic`. `path` and `feature`: see `Answer.ok`."""
    anthropic = await anthropic_library()
    async with anthropic.AsyncAnthropic(
        base_url=server.target.url,
        api_key=server.target.anthropic_key or server.target.key or "none",
        max_retries=0,
        timeout=TIMEOUT_S,
    ) as client:
        with refusals_told(anthropic, path, feature):
            yield client


def asked_of(server: Server, content: str = QUESTION, **fields: Any) -> dict[str, Any]:
    """A greedy message. (Later clients have no `temperature` of their own.)"""
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 20,
        "extra_body": {"temperature": 0},
        **fields,
    }


@row
async def a_message_is_streamed_as_it_is_whole(server: Server) -> None:
    """The texts of messages.stream add up to its final message, which is what create gives."""
    async with anthropic_client(server) as client:
        whole = await client.messages.create(**asked_of(server))
        async with client.messages.stream(**asked_of(server)) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    check(whole.content and whole.content[0].text, "there is no text")
    found = (text, final.content[0].text, final.stop_reason, final.usage.output_tokens)
    expected = (whole.content[0].text, whole.content[0].text, whole.stop_reason, whole.usage.output_tokens)
    check_equal(found, expected, "what is streamed")


@row
async def tokens_are_counted(server: Server) -> None:
    """messages.count_tokens says what the prompt of messages.create has."""
    async with anthropic_client(server, f"{PATH}/count_tokens") as client:
        turns = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}]}
        counted = (await client.messages.count_tokens(**turns, system="Be brief.")).input_tokens
        usage = (await client.messages.create(**asked_of(server, max_tokens=1), system="Be brief.")).usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    check_equal(usage.input_tokens + cached, counted, "the length of the prompt")


@row
async def a_forced_call_is_streamed_as_it_is_whole(server: Server) -> None:
    """Of a call that is demanded, the pieces of its JSON add up to the input that comes whole."""
    asked = asked_of(server, ABOUT_WEATHER, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=ROOM)
    async with anthropic_client(server, feature="tool") as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            await stream.until_done()
            final = await stream.get_final_message()
    if "max_tokens" in (whole.stop_reason, final.stop_reason):
        raise NotApplicable("the model did not come to an end in time")
    check_equal((whole.stop_reason, final.stop_reason), ("tool_use", "tool_use"), "stop_reason")
    calls, streamed = (
        [(block.name, block.input) for block in message.content if block.type == "tool_use"]
        for message in (whole, final)
    )
    check(calls, "no tool was called")
    for name, given in calls:
        check_arguments(name, given)
    check_equal(streamed, calls, "the streamed calls")


@row
async def refusals_raise_errors_of_their_kind(server: Server) -> None:
    """400 is a BadRequestError, 404 a NotFoundError, with Anthropic's type and a request_id."""
    anthropic = await anthropic_library()
    async with anthropic_client(server) as client:
        await client.messages.create(**asked_of(server, max_tokens=1))  # the route is there
        for kind, expected, fields in (
            (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"temperature": "hot"}}),
            (anthropic.NotFoundError, "not_found_error", {"model": "no-such-model"}),
        ):
            try:
                await client.messages.create(**asked_of(server, **fields))
            except kind as error:
                check_equal(error.body["error"]["type"], expected, "the error's type")
                check(error.request_id, "an error has no request_id")
            else:
                raise CheckFailed(f"{fields} is no {kind.__name__}")


@row
async def a_wrong_key_is_an_authentication_error(server: Server) -> None:
    """An unknown key is an AuthenticationError."""
    anthropic = await anthropic_library()
    await server.needs_keys()
    async with anthropic_client(server) as client:
        await client.messages.create(**asked_of(server, max_tokens=1))  # the route is there
        try:
            await client.with_options(api_key="wrong-key").messages.create(**asked_of(server, max_tokens=1))
        except anthropic.AuthenticationError as error:
            check_equal(error.body["error"]["type"], "authentication_error", "the error's type")
        else:
            raise CheckFailed("a wrong key is let in")
