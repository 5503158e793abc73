"""Tool calls in chats."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.server import Server


def function(name: str, *cities: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(cities)}},
        "required": ["city"],
        "additionalProperties": False,
    }
    definition = {"name": name, "description": "Tells the weather.", "strict": True, "parameters": parameters}
    return {"type": "function", "function": definition}


TOOLS = [function("get_weather", "Paris", "Rome"), function("get_time", "Lima", "Oslo")]
NAMED = {"type": "function", "function": {"name": "get_time"}}
CITIES = {"get_weather": ("Paris", "Rome"), "get_time": ("Lima", "Oslo")}


def fields_of(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the weather in Paris? Call a tool."}]
    return {"messages": messages, "tools": TOOLS, "max_tokens": 512, **fields}


async def choice_of(server: Server, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = (await server.chat(**fields_of(**fields))).ok("tool").json["choices"][0]
    if choice["finish_reason"] == "length":
        raise NotApplicable("the model did not come to an end in time")
    return choice


def check_calls(calls: list[dict[str, Any]]) -> None:
    check(calls, "no tool was called")
    check_equal(len({call["id"] for call in calls}), len(calls), "the number of different ids")
    for call in calls:
        check_equal(call["type"], "function", "type")
        check(isinstance(call["function"]["arguments"], str), "arguments are no JSON text")
        name = call["function"]["name"]
        check_in(name, CITIES, "the called tool")
        arguments = json.loads(call["function"]["arguments"])
        check_equal(set(arguments), {"city"}, "the set of arguments")
        check_in(arguments["city"], CITIES[name], "city")


@row
async def required_calls_a_tool(server: Server) -> None:
    """tool_choice required ends in calls of given tools, with arguments as their strict schemas want them."""
    choice = await choice_of(server, tool_choice="required")
    check_calls(choice["message"].get("tool_calls") or [])
    check_equal(choice["finish_reason"], "tool_calls", "finish_reason")


@row
async def a_named_tool_is_called(server: Server) -> None:
    """A tool_choice that names a tool calls that one."""
    choice = await choice_of(server, tool_choice=NAMED)
    calls = choice["message"].get("tool_calls") or []
    check_calls(calls)
    check_equal({call["function"]["name"] for call in calls}, {"get_time"}, "the set of called tools")
    check_in(choice["finish_reason"], ("stop", "tool_calls"), "finish_reason")  # OpenAI says stop here


@row
async def none_calls_no_tool(server: Server) -> None:
    """tool_choice none never calls one."""
    document = (await server.chat(**fields_of(tool_choice="none", max_tokens=32))).ok("tool").json
    check(not document["choices"][0]["message"].get("tool_calls"), "a tool was called")


@row
async def auto_leaves_it_to_the_model(server: Server) -> None:
    """tool_choice auto is taken; what the model calls is well-formed."""
    document = (await server.chat(**fields_of(tool_choice="auto", max_tokens=64))).ok("tool").json
    for call in document["choices"][0]["message"].get("tool_calls") or []:
        check(isinstance(call["function"]["arguments"], str), "arguments are no JSON text")


@row
async def streamed_pieces_add_up(server: Server) -> None:
    """The first delta of a call has id and name, all together have the arguments of the whole answer."""
    whole = await choice_of(server, tool_choice="required")
    stream = (await server.chat_stream(**fields_of(tool_choice="required"))).ok("tool")
    calls: dict[int, dict[str, Any]] = {}
    for chunk in stream.choice_chunks[0]:
        for delta in chunk["delta"].get("tool_calls") or []:
            if delta["index"] not in calls:
                check(delta.get("id") and delta["function"].get("name"), f"a call begins with {delta}")
                calls[delta["index"]] = {"id": delta["id"], "type": delta["type"], "function": {
                    "name": delta["function"]["name"], "arguments": ""}}  # fmt: skip
            calls[delta["index"]]["function"]["arguments"] += delta["function"].get("arguments") or ""
    streamed = [calls[index] for index in sorted(calls)]
    check_calls(streamed)
    check_equal(
        [c["function"] for c in streamed], [c["function"] for c in whole["message"]["tool_calls"]], "calls"
    )
    check_equal(stream.finish_reasons[0], ["tool_calls"], "the finish reasons")


@row
async def parallel_calls_can_be_forbidden(server: Server) -> None:
    """parallel_tool_calls false gives one call."""
    choice = await choice_of(server, tool_choice="required", parallel_tool_calls=False)
    check_equal(len(choice["message"].get("tool_calls") or []), 1, "the number of calls")


@row
async def results_are_taken_back(server: Server) -> None:
    """An assistant's message with calls and without content, and the tool's message, are history."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
    }
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    (await server.chat(**fields_of(messages=messages, max_tokens=8))).ok("tool")


@row
async def an_unknown_tool_is_refused(server: Server) -> None:
    """A tool_choice that names no given tool is a 400."""
    unknown = {"type": "function", "function": {"name": "no_such_tool"}}
    (await server.chat(**fields_of(tool_choice=unknown))).refused(400, param="tool_choice")


@row
async def a_choice_needs_tools(server: Server) -> None:
    """tool_choice required without tools is a 400."""
    (await server.chat(tool_choice="required")).refused(400)


@row
async def wrong_tools_are_refused(server: Server) -> None:
    """Tools without a name, or with parameters that are no schema, are a 400 of tools."""
    for wrong in ({"type": "function", "function": {}}, {"type": "function"},
                  {"type": "function", "function": {"name": "x", "parameters": "y"}}):  # fmt: skip
        (await server.chat(tools=[wrong])).refused(400, param="tools")
