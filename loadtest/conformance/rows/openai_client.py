"""OpenAI's Python client, unchanged: what it makes of answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel

from loadtest.conformance.check import CheckFailed, NotApplicable, check, check_equal, check_in
from loadtest.conformance.client_library import TIMEOUT_S, client_library, refusals_told
from loadtest.conformance.row import row
from loadtest.conformance.rows.chat import stop_in
from loadtest.conformance.rows.embeddings import TEXTS, are_close, vectors_of
from loadtest.conformance.server import QUESTION, Server

OLDEST = (2, 0)
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ROOM = 300  # tokens: enough for any form or call below
LONG = 2000  # tokens
IMPATIENCE_S = 0.02
ABOUT_A_RIVER = "Which river flows through Rome? Answer as JSON."
ABOUT_WEATHER = "What is the weather in Paris? Call a tool."


class River(BaseModel):
    name: Literal["Rhine", "Tiber"]
    is_long: bool


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]


def options_of(server: Server) -> dict[str, Any]:
    return {
        "base_url": f"{server.target.url}/v1",
        "api_key": server.target.key or "none",
        "max_retries": 0,
        "timeout": TIMEOUT_S,
    }


async def openai_library() -> ModuleType:
    return await client_library("openai", OLDEST)


@asynccontextmanager
async def openai_client(server: Server, path: str = CHAT, feature: str | None = None) -> AsyncIterator[Any]:
    """An `AsyncOpenAI`. `path` and `feature`: see `Answer.ok`."""
    openai = await openai_library()
    async with openai.AsyncOpenAI(**options_of(server)) as client:
        with refusals_told(openai, path, feature):
            try:
                yield client
            except openai.LengthFinishReasonError as error:
                raise NotApplicable("the model did not come to an end in time") from error


def asked_of(server: Server, **fields: Any) -> dict[str, Any]:
    """A greedy chat."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": server.model, "messages": messages, "max_tokens": 20, "temperature": 0, **fields}


def what_came(completion: Any) -> tuple[Any, ...]:
    """Of a whole answer, or of what a stream has come to."""
    (choice,) = completion.choices
    return choice.message.content, choice.finish_reason, completion.usage.completion_tokens


@row
async def models_are_listed_and_found(server: Server) -> None:
    """models.list and models.retrieve have the model, and one that there is not is a NotFoundError."""
    openai = await openai_library()
    async with openai_client(server, "/v1/models/") as client:
        check_in(server.model, [model.id async for model in client.models.list()], "the model")
        check_equal((await client.models.retrieve(server.model)).id, server.model, "the retrieved id")
        try:
            await client.models.retrieve("no/such")
        except openai.NotFoundError as error:
            check_equal(error.code, "model_not_found", "code")
        else:
            raise CheckFailed("a model that there is not was found")


@row
async def a_chat_is_streamed_as_it_is_whole(server: Server) -> None:
    """The chunks of create(stream=True) add up to what create gives: text, finish_reason and usage."""
    async with openai_client(server) as client:
        whole = what_came(await client.chat.completions.create(**asked_of(server)))
        check(isinstance(whole[0], str) and whole[0], f"the content is {whole[0]!r}")
        stream = await client.chat.completions.create(
            **asked_of(server), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    check_equal((text, choices[-1].finish_reason), whole[:2], "the streamed content and finish_reason")
    check(chunks[-1].usage, "the last chunk has no usage")
    check_equal(chunks[-1].usage.completion_tokens, whole[2], "the streamed completion_tokens")


@row
async def its_stream_helper_comes_to_the_whole_answer(server: Server) -> None:
    """chat.completions.stream: content.delta events add up to content.done and to the final completion."""
    _, stop = await stop_in(server)  # the helper gives nothing of an answer that is cut by its length
    asked = asked_of(server, max_tokens=48, stop=stop)
    async with openai_client(server, feature="stop") as client:
        whole = await client.chat.completions.create(**asked)
        manager = client.chat.completions.stream(**asked, stream_options={"include_usage": True})
        async with manager as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
    check_equal(what_came(final), what_came(whole), "the final completion")
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    done = [event.content for event in events if event.type == "content.done"]
    check_equal(done, [deltas], "the content of content.done")
    check_equal(deltas, final.choices[0].message.content, "the deltas")


@row
async def its_synchronous_form_reads_the_same(server: Server) -> None:
    """OpenAI and AsyncOpenAI read the same answer, whole and streamed."""
    openai = await openai_library()

    def read() -> tuple[str, str]:
        with openai.OpenAI(**options_of(server)) as client:
            whole = client.chat.completions.create(**asked_of(server))
            stream = client.chat.completions.create(**asked_of(server), stream=True)
            text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
            return whole.choices[0].message.content, text

    async with openai_client(server) as client:
        expected = (await client.chat.completions.create(**asked_of(server))).choices[0].message.content
        check_equal(await asyncio.to_thread(read), (expected, expected), "what it reads")


@row
async def a_forced_call_is_parsed(server: Server) -> None:
    """Of a call that is demanded, parse and the stream helper give the arguments as objects, and the same."""
    openai = await openai_library()
    asked = asked_of(
        server,
        messages=[{"role": "user", "content": ABOUT_WEATHER}],
        tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
        tool_choice="required",
        max_tokens=ROOM,
    )
    async with openai_client(server, feature="tool") as client:
        calls = (await client.chat.completions.parse(**asked)).choices[0].message.tool_calls
        check(calls, "no tool was called")
        for call in calls:
            check_equal(call.function.name, "get_weather", "the called tool")
            check(isinstance(call.function.parsed_arguments, Weather), "the arguments were not parsed")
        async with client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            final = (await stream.get_final_completion()).choices[0].message.tool_calls
    expected = [call.function.parsed_arguments for call in calls]
    check_equal([call.function.parsed_arguments for call in final or ()], expected, "the streamed arguments")
    kind = "tool_calls.function.arguments"
    deltas = "".join(event.arguments_delta for event in events if event.type == f"{kind}.delta")
    done = "".join(event.arguments for event in events if event.type == f"{kind}.done")
    check_equal(deltas, done, "the deltas of the arguments")


@row
async def a_form_is_parsed(server: Server) -> None:
    """chat.completions.parse and the stream helper give the same object of the asked pydantic model."""
    messages = [{"role": "user", "content": ABOUT_A_RIVER}]
    asked = asked_of(server, messages=messages, response_format=River, max_tokens=ROOM)
    async with openai_client(server, feature="response_format") as client:
        parsed = (await client.chat.completions.parse(**asked)).choices[0].message.parsed
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message.parsed
    check(isinstance(parsed, River), f"parsed is {parsed!r}")
    check_equal(streamed, parsed, "the streamed object")


@row
async def a_response_is_streamed_as_it_is_whole(server: Server) -> None:
    """The deltas of responses.create(stream=True) add up to output_text, which is that of the whole one."""
    asked = {"model": server.model, "input": QUESTION, "max_output_tokens": 20, "temperature": 0}
    async with openai_client(server, RESPONSES) as client:
        whole = (await client.responses.create(**asked)).output_text
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    check(whole, "there is no output_text")
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    check_in(last.type, ("response.completed", "response.incomplete"), "the last event")
    check_equal((deltas, last.response.output_text), (whole, whole), "the streamed text")


@row
async def a_form_of_a_response_is_parsed(server: Server) -> None:
    """responses.parse and the stream helper give an object of the asked pydantic model, and the same."""
    asked = {"model": server.model, "input": ABOUT_A_RIVER, "max_output_tokens": ROOM, "temperature": 0}
    async with openai_client(server, RESPONSES, "text") as client:
        parsed = (await client.responses.parse(**asked, text_format=River)).output_parsed
        async with client.responses.stream(**asked, text_format=River) as stream:
            streamed = (await stream.get_final_response()).output_parsed
    check(isinstance(parsed, River), f"output_parsed is {parsed!r}")
    check_equal(streamed, parsed, "the streamed object")


@row
async def vectors_are_read_in_both_encodings(server: Server) -> None:
    """embeddings.create gives the same numbers by base64, which it asks for by itself, and by float."""
    await vectors_of(server, TEXTS)  # it makes some
    asked = {"model": server.embedding_model, "input": TEXTS}
    async with openai_client(server, "/v1/embeddings") as client:
        packed = await client.embeddings.create(**asked)
        plain = await client.embeddings.create(**asked, encoding_format="float")
    check_equal([entry.index for entry in packed.data], [0, 1, 2], "the indices")
    for one, other in zip(packed.data, plain.data, strict=True):
        check(one.embedding and are_close(one.embedding, other.embedding), "the numbers differ")


@row
async def every_answer_has_a_request_id(server: Server) -> None:
    """The x-request-id of raw answers is the _request_id of parsed ones, and errors have one, too."""
    openai = await openai_library()
    async with openai_client(server) as client:
        raw = await client.chat.completions.with_raw_response.create(**asked_of(server, max_tokens=1))
        found = raw.headers.get("x-request-id")
        check(found, "there is no x-request-id")
        check_equal((raw.request_id, raw.parse()._request_id), (found, found), "the request_id")
        check((await client.models.list())._request_id, "the list of models has no _request_id")
        try:
            await client.chat.completions.create(**asked_of(server, model="no-such-model"))
        except openai.NotFoundError as error:
            check(error.request_id, "an error has no request_id")
        else:
            raise CheckFailed("a model that there is not has answered")


@row
async def refusals_raise_errors_of_their_kind(server: Server) -> None:
    """400 is a BadRequestError with the param, 404 a NotFoundError with the code, streamed or not."""
    openai = await openai_library()
    async with openai_client(server) as client:
        for kind, name, expected, fields in (
            (openai.BadRequestError, "param", "temperature", {"temperature": 3}),
            (openai.NotFoundError, "code", "model_not_found", {"model": "no-such-model"}),
        ):
            for is_streamed in (False, True):
                try:
                    await client.chat.completions.create(**asked_of(server, **fields), stream=is_streamed)
                except kind as error:
                    check_equal(getattr(error, name), expected, name)
                    check(error.message, "an error without a message")
                else:
                    raise CheckFailed(f"{fields} is no {kind.__name__}")


@row
async def a_wrong_key_is_an_authentication_error(server: Server) -> None:
    """An unknown key is an AuthenticationError, of lists as of answers."""
    openai = await openai_library()
    await server.needs_keys()
    async with openai_client(server) as client:
        stranger = client.with_options(api_key="wrong-key")
        for call, asked in (
            (stranger.models.list, {}),
            (stranger.chat.completions.create, asked_of(server, max_tokens=1)),
        ):
            try:
                await call(**asked)
            except openai.AuthenticationError as error:
                check(error.message, "an error without a message")
            else:
                raise CheckFailed("a wrong key is let in")


@row
async def an_impatient_client_times_out(server: Server) -> None:
    """Work that takes longer than the client waits is an APITimeoutError; the next request is answered."""
    openai = await openai_library()
    limit = openai.Timeout(TIMEOUT_S, read=IMPATIENCE_S)
    room = min(LONG, (server.target.max_model_len or LONG) // 2)
    async with openai_client(server) as client:
        try:
            await client.with_options(timeout=limit).chat.completions.create(
                **asked_of(server, max_tokens=room)
            )
        except openai.APITimeoutError:
            pass
        else:
            raise NotApplicable(f"a long answer came within {IMPATIENCE_S:g} s")
        await client.chat.completions.create(**asked_of(server, max_tokens=1))
