"""Tool use in `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.rows.messages import check_refused, length_of, there
from loadtest.conformance.rows.tools import FUNCTIONS, QUESTION, RAIN, ROOM, check_arguments
from loadtest.conformance.server import Server

TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
    for each in FUNCTIONS
]


def fields_of(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, "tools": TOOLS, "max_tokens": ROOM, **fields}


async def message_of(server: Server, choice: dict[str, Any], **fields: Any) -> dict[str, Any]:
    message: dict[str, Any] = (
        (await server.message(**fields_of(tool_choice=choice, **fields))).ok("tool").json
    )
    if message["stop_reason"] == "max_tokens":
        raise NotApplicable("the model did not come to an end in time")
    return message


def uses_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in message["content"] if block["type"] == "tool_use"]


def check_uses(uses: list[dict[str, Any]]) -> None:
    check(uses, "no tool was used")
    check_equal(len({use["id"] for use in uses}), len(uses), "the number of different ids")
    for use in uses:
        check(isinstance(use["input"], dict), f"input is no object: {use['input']!r}")
        check_arguments(use["name"], use["input"])


@row
async def a_tool_is_used(server: Server) -> None:
    """tool_choice any gives a tool_use block whose input is an object, and says so in stop_reason."""
    message = await message_of(server, {"type": "any"})
    check_uses(uses_of(message))
    check_equal(message["stop_reason"], "tool_use", "stop_reason")


@row
async def a_named_tool_is_used(server: Server) -> None:
    """A tool_choice that names a tool uses that one."""
    uses = uses_of(await message_of(server, {"type": "tool", "name": "get_time"}))
    check_uses(uses)
    check_equal({use["name"] for use in uses}, {"get_time"}, "the set of used tools")


@row
async def none_uses_no_tool(server: Server) -> None:
    """tool_choice none never uses one."""
    answer = await server.message(**fields_of(tool_choice={"type": "none"}, max_tokens=32))
    check_equal(uses_of(answer.ok("tool").json), [], "the list of used tools")


@row
async def auto_leaves_it_to_the_model(server: Server) -> None:
    """tool_choice auto is taken; stop_reason says whether a tool is used."""
    message = (await server.message(**fields_of(tool_choice={"type": "auto"}, max_tokens=64))).ok("tool").json
    if message["stop_reason"] != "max_tokens":
        expected = "tool_use" if uses_of(message) else "end_turn"
        check_equal(message["stop_reason"], expected, "stop_reason")


@row
async def parallel_use_can_be_forbidden(server: Server) -> None:
    """disable_parallel_tool_use gives one use."""
    for _ in range(3):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        check_equal(len(uses_of(await message_of(server, choice, temperature=1))), 1, "the number of uses")


@row
async def streamed_input_adds_up(server: Server) -> None:
    """input_json_delta pieces are a JSON object; a block begins with its id, its name and no input."""
    fields = fields_of(tool_choice={"type": "any"})
    documents = (await server.message_stream(**fields)).ok("tool").documents
    last = next(d for d in documents if d["type"] == "message_delta")
    if last["delta"]["stop_reason"] == "max_tokens":
        raise NotApplicable("the model did not come to an end in time")
    check_equal(last["delta"]["stop_reason"], "tool_use", "stop_reason")
    begun = {
        d["index"]: d["content_block"]
        for d in documents
        if d["type"] == "content_block_start" and d["content_block"]["type"] == "tool_use"
    }
    check_equal([block["input"] for block in begun.values()], [{}] * len(begun), "the input of a new block")
    for index, block in begun.items():
        deltas = [d["delta"] for d in documents if d["type"] == "content_block_delta" and d["index"] == index]
        check_equal({delta["type"] for delta in deltas}, {"input_json_delta"}, "the set of deltas' types")
        block["input"] = json.loads("".join(delta["partial_json"] for delta in deltas))
    check_uses(list(begun.values()))


@row
async def results_are_taken_back(server: Server) -> None:
    """tool_result blocks behind the message that used the tools are read."""
    message = await message_of(server, {"type": "any"})
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": message["content"]}]
    lengths = []
    for result in ("", RAIN):
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": result} for use in uses_of(message)
        ]
        fields = fields_of(messages=[*turns, {"role": "user", "content": results}], max_tokens=8)
        lengths.append(length_of((await server.message(**fields)).ok().json))
    check(lengths[0] < lengths[1], f"prompts of {lengths[0]} and {lengths[1]} tokens")


@row
async def tools_are_counted(server: Server) -> None:
    """count_tokens counts the definitions of tools, too."""
    counts = []
    for tools in ([], TOOLS):
        body = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}], "tools": tools}
        headers = server.anthropic_headers
        answer = await server.post("/v1/messages/count_tokens", body, headers=headers, key=None)
        counts.append(answer.ok("tool").json["input_tokens"])
    if counts[0] == counts[1]:
        raise NotApplicable("the template of this model has no place for tools")
    check(counts[0] < counts[1], f"tools make a prompt of {counts[1]} of one of {counts[0]} tokens")


@row
async def an_unknown_tool_is_refused(server: Server) -> None:
    """A tool_choice that names no given tool is a 400."""
    await there(server)
    answer = await server.message(**fields_of(tool_choice={"type": "tool", "name": "no_such_tool"}))
    check_refused(answer, 400, "invalid_request_error")
    check_in("tool_choice", answer.says, "tool_choice in the message")


@row
async def wrong_tools_are_refused(server: Server) -> None:
    """Tools without a name, or with an input_schema that is none, are a 400."""
    await there(server)
    for wrong in ({"input_schema": {"type": "object"}}, {"name": "x", "input_schema": "y"}, {"name": "x"}):
        answer = await server.message(**fields_of(tools=[wrong]))
        check_refused(answer, 400, "invalid_request_error")
        check_in("tools", answer.says, "tools in the message")
