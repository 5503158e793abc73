"""Tool calls in `/v1/responses`."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.rows.responses import PATH, body_of, create
from loadtest.conformance.rows.tools import FUNCTIONS, QUESTION, RAIN, ROOM, check_arguments
from loadtest.conformance.server import Server

TOOLS = [{"type": "function", **each} for each in FUNCTIONS]
NAMED = {"type": "function", "name": "get_time"}


def fields_of(**fields: Any) -> dict[str, Any]:
    return {"input": QUESTION, "tools": TOOLS, "max_output_tokens": ROOM, **fields}


async def response_of(server: Server, **fields: Any) -> dict[str, Any]:
    response = await create(server, "tool", **fields_of(**fields))
    if response["status"] == "incomplete":
        raise NotApplicable("the model did not come to an end in time")
    return response


def calls_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response["output"] if item["type"] == "function_call"]


def check_calls(calls: list[dict[str, Any]]) -> None:
    check(calls, "no tool was called")
    for name in ("call_id", "id"):
        check_equal(len({call[name] for call in calls}), len(calls), f"the number of different {name}s")
    for call in calls:
        check(isinstance(call["arguments"], str), "arguments are no JSON text")
        check_arguments(call["name"], json.loads(call["arguments"]))


@row
async def a_tool_is_called(server: Server) -> None:
    """tool_choice required: a function call is an item of its own, with a call_id."""
    check_calls(calls_of(await response_of(server, tool_choice="required")))


@row
async def a_named_tool_is_called(server: Server) -> None:
    """A tool_choice that names a tool calls that one."""
    calls = calls_of(await response_of(server, tool_choice=NAMED))
    check_calls(calls)
    check_equal({call["name"] for call in calls}, {"get_time"}, "the set of called tools")


@row
async def none_calls_no_tool(server: Server) -> None:
    """tool_choice none never calls one."""
    response = await create(server, "tool", **fields_of(tool_choice="none", max_output_tokens=32))
    check_equal(calls_of(response), [], "the list of calls")


@row
async def tools_are_told_back(server: Server) -> None:
    """A response holds the tools and the tool_choice that it was made with."""
    response = await create(server, "tool", **fields_of(tool_choice="auto", max_output_tokens=32))
    check_equal(response["tool_choice"], "auto", "tool_choice")
    check_equal([tool["name"] for tool in response["tools"]], [each["name"] for each in TOOLS], "the tools")


@row
async def parallel_calls_can_be_forbidden(server: Server) -> None:
    """parallel_tool_calls false gives one call."""
    for _ in range(3):
        fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1}
        check_equal(len(calls_of(await response_of(server, **fields))), 1, "the number of calls")


@row
async def streamed_arguments_add_up(server: Server) -> None:
    """Deltas of arguments are those that `done` and the item at the end repeat, all under one item's id."""
    body = body_of(server, **fields_of(tool_choice="required"))
    documents = (await server.stream(PATH, body)).ok("tool").documents
    if documents[-1]["type"] == "response.incomplete":
        raise NotApplicable("the model did not come to an end in time")
    calls = calls_of(documents[-1]["response"])
    check_calls(calls)
    begun = [d["item"]["id"] for d in documents if d["type"] == "response.output_item.added"]
    for call in calls:
        its = [d for d in documents if d.get("item_id") == call["id"]]
        deltas = [d["delta"] for d in its if d["type"] == "response.function_call_arguments.delta"]
        done = [d["arguments"] for d in its if d["type"] == "response.function_call_arguments.done"]
        check_in(call["id"], begun, "the call")
        check_equal("".join(deltas), call["arguments"], "the streamed arguments")
        check_equal(done, [call["arguments"]], "the arguments of `done`")


@row
async def results_are_taken_back(server: Server) -> None:
    """function_call_output behind previous_response_id, or behind the items themselves, is read."""
    first = await response_of(server, tool_choice="required", store=True)
    history = [{"role": "user", "content": QUESTION}, *first["output"]]
    lengths = []
    for result in ("", RAIN):
        outputs = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            for call in calls_of(first)
        ]
        fields = fields_of(max_output_tokens=16, input=outputs, previous_response_id=first["id"])
        stored = await create(server, "previous_response_id", **fields)
        fields = fields_of(max_output_tokens=16, input=[*history, *outputs])
        told = await create(server, **fields)
        lengths.append(stored["usage"]["input_tokens"])
        check_equal(told["usage"]["input_tokens"], lengths[-1], "the length of the conversation")
    before = first["usage"]["input_tokens"]
    check(before < lengths[0] < lengths[1], f"prompts of {before}, {lengths[0]} and {lengths[1]} tokens")


@row
async def an_unknown_tool_is_refused(server: Server) -> None:
    """A tool_choice that names no given tool is a 400."""
    await create(server)  # the route is there
    wrong = {"type": "function", "name": "no_such_tool"}
    (await server.post(PATH, body_of(server, **fields_of(tool_choice=wrong)))).refused(
        400, param="tool_choice"
    )


@row
async def wrong_tools_are_refused(server: Server) -> None:
    """Tools without a name, or with parameters that are no schema, are a 400 of tools."""
    await create(server)  # the route is there
    for wrong in ({"type": "function"}, {"type": "function", "name": "x", "parameters": "y"}):
        answer = await server.post(PATH, body_of(server, tools=[wrong]))
        answer.refused(400, param="tools")
