"""`/v1/responses`."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.check import check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.rows.structured_output import FORMAT
from loadtest.conformance.rows.tools import CITIES, TOOLS
from loadtest.conformance.server import QUESTION, Server

PATH = "/v1/responses"


def body_of(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "input": QUESTION, "max_output_tokens": 24, "temperature": 0} | fields


async def create(server: Server, feature: str | None = None, **fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = (await server.post(PATH, body_of(server, **fields))).ok(feature).json
    return document


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


INSTRUCTIONS = "Be brief, speak plainly, and say nothing that you do not know."


@row
async def answer_has_the_shape(server: Server) -> None:
    """A response with a message of output_text, and usage that adds up."""
    response = await create(server)
    check_equal(response["object"], "response", "object")
    check_in(response["status"], ("completed", "incomplete"), "status")
    message = next(item for item in response["output"] if item["type"] == "message")
    check_equal(
        (message["role"], message["content"][0]["type"]), ("assistant", "output_text"), "role and type"
    )
    check_equal(message["content"][0]["annotations"], [], "annotations")
    usage = response["usage"]
    check_equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"], "total_tokens")


@row
async def input_may_be_a_list(server: Server) -> None:
    """A user's message as an item says what the string says."""
    items = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    check_equal(text_of(await create(server, input=items)), text_of(await create(server)), "the text")


@row
async def instructions_are_read(server: Server) -> None:
    """instructions are a part of the prompt."""
    # Not against none at all: some chat templates have instructions of their own, which these replace.
    few, many = (
        await create(server, instructions="Be brief."),
        await create(server, instructions=INSTRUCTIONS),
    )
    check(many["usage"]["input_tokens"] > few["usage"]["input_tokens"], "the prompt is no longer with more")


@row
async def the_limit_leaves_it_incomplete(server: Server) -> None:
    """An answer that max_output_tokens cuts is incomplete, and says why."""
    response = await create(server, max_output_tokens=16)
    check_equal(response["status"], "incomplete", "status")
    check_equal(response["incomplete_details"], {"reason": "max_output_tokens"}, "incomplete_details")


@row
async def events_come_in_order(server: Server) -> None:
    """Numbered without a gap, named as their type, from response.created to the end."""
    stream = (await server.stream(PATH, body_of(server))).ok()
    types = [document["type"] for document in stream.documents]
    check_equal([event.name for event in stream.events][: len(types)], types, "the names of events")
    numbers = [document["sequence_number"] for document in stream.documents]
    check_equal(numbers, list(range(len(numbers))), "the sequence numbers")
    check_equal(types[0], "response.created", "the first event")
    check_in(types[-1], ("response.completed", "response.incomplete"), "the last event")
    order = ["response.created", "response.output_item.added", "response.content_part.added",
             "response.output_text.delta", "response.output_text.done", "response.content_part.done",
             "response.output_item.done", types[-1]]  # fmt: skip
    check_equal([each for each in dict.fromkeys(types) if each in order], order, "the order")


@row
async def deltas_add_up(server: Server) -> None:
    """Deltas are the text that `done` and the last event repeat, and that of the whole answer."""
    documents = (await server.stream(PATH, body_of(server))).ok().documents
    deltas = "".join(d["delta"] for d in documents if d["type"] == "response.output_text.delta")
    done = [d["text"] for d in documents if d["type"] == "response.output_text.done"]
    check_equal(done, [deltas], "the text of `done`")
    check_equal(text_of(documents[-1]["response"]), deltas, "the text of the last event")
    check_equal(text_of(await create(server)), deltas, "the text of the whole answer")


@row
async def it_can_be_retrieved_and_deleted(server: Server) -> None:
    """A response is kept under its id until it is deleted."""
    response = await create(server, store=True)
    path = f"{PATH}/{response['id']}"
    check_equal((await server.get(path)).ok().json["output"], response["output"], "the retrieved output")
    check_equal((await server.send("DELETE", path)).ok().json["deleted"], True, "deleted")
    check_equal((await server.get(path)).status, 404, "the status of a deleted one")


@row
async def it_is_not_kept_against_the_will(server: Server) -> None:
    """store false: nothing can be retrieved."""
    response = await create(server, store=False)
    check_equal((await server.get(f"{PATH}/{response['id']}")).status, 404, "status")


@row
async def a_conversation_goes_on(server: Server) -> None:
    """previous_response_id puts the turns before into the prompt."""
    first = await create(server, store=True)
    next_one = await create(server, "previous_response_id", previous_response_id=first["id"], input="Go on.")
    check(next_one["usage"]["input_tokens"] > first["usage"]["input_tokens"], "the prompt has no history")


@row
async def an_unknown_predecessor_is_refused(server: Server) -> None:
    """A previous_response_id that there is not is named."""
    await create(server)  # the route is there
    answer = await server.post(PATH, body_of(server, previous_response_id="resp_none"))
    check_in(answer.status, (400, 404), "status")
    check_equal(answer.error["param"], "previous_response_id", "param")


@row
async def a_form_is_kept(server: Server) -> None:
    """text.format json_schema."""
    form = {"type": "json_schema", **FORMAT["json_schema"]}  # type: ignore[dict-item]
    response = await create(server, "text", text={"format": form}, max_output_tokens=400)
    if response["status"] == "completed":
        check_equal(
            set(json.loads(text_of(response))), {"colour", "count", "is_new", "tags"}, "the set of fields"
        )


@row
async def a_tool_is_called(server: Server) -> None:
    """A function call is an item of its own, with a call_id."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = await create(server, "tool", tools=tools, tool_choice="required", max_output_tokens=512)
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    check(calls, "no tool was called")
    check(all(call["call_id"] for call in calls), "a call without call_id")
    check_in(json.loads(calls[0]["arguments"])["city"], CITIES[calls[0]["name"]], "city")


@row
async def an_input_is_required(server: Server) -> None:
    """A body without input is a 400."""
    (await server.post(PATH, {"model": server.model})).refused(400)
