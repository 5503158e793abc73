"""Tool calls in chats."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.answer import StreamedAnswer
from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.rows.streams import LIKE_FRAMING, LIKE_THE_END, MANY_SCRIPTS
from loadtest.conformance.server import Server

QUESTION = "What is the weather in Paris? Call a tool."
ROOM = 512  # tokens: enough for any call below


def function(name: str, *cities: str) -> dict[str, Any]:
    """What each interface has its own shape for."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(cities)}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"name": name, "description": "Tells about a city.", "strict": True, "parameters": parameters}


CITIES = {"get_weather": ("Paris", "Rome"), "get_time": ("Lima", "Oslo")}
FUNCTIONS = [function(name, *cities) for name, cities in CITIES.items()]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
NAMED = {"type": "function", "function": {"name": "get_time"}}
RAIN = "Rain, and more rain to come."


def fields_of(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, "tools": TOOLS, "max_tokens": ROOM, **fields}


async def choice_of(server: Server, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = (await server.chat(**fields_of(**fields))).ok("tool").json["choices"][0]
    if choice["finish_reason"] == "length":
        raise NotApplicable("the model did not come to an end in time")
    return choice


def check_arguments(name: str, arguments: Any) -> None:
    """Arguments of one of CITIES' tools, parsed."""
    check_in(name, CITIES, "the called tool")
    check_equal(set(arguments), {"city"}, "the set of arguments")
    check_in(arguments["city"], CITIES[name], "city")


def check_calls(calls: list[dict[str, Any]]) -> None:
    check(calls, "no tool was called")
    check_equal(len({call["id"] for call in calls}), len(calls), "the number of different ids")
    for call in calls:
        check_equal(call["type"], "function", "type")
        check(isinstance(call["function"]["arguments"], str), "arguments are no JSON text")
        check_arguments(call["function"]["name"], json.loads(call["function"]["arguments"]))


def streamed_calls(stream: StreamedAnswer) -> list[dict[str, Any]]:
    """The calls that the deltas of the first choice add up to."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in stream.choice_chunks[0]:
        for delta in chunk["delta"].get("tool_calls") or []:
            if delta["index"] not in calls:
                check(delta.get("id") and delta["function"].get("name"), f"a call begins with {delta}")
                calls[delta["index"]] = {"id": delta["id"], "type": delta["type"], "function": {
                    "name": delta["function"]["name"], "arguments": ""}}  # fmt: skip
            else:
                check(not delta["function"].get("name"), f"a call is named again by {delta}")
            calls[delta["index"]]["function"]["arguments"] += delta["function"].get("arguments") or ""
    check_equal(sorted(calls), list(range(len(calls))), "the indices of calls")
    return [calls[index] for index in sorted(calls)]


async def several_calls(server: Server) -> list[dict[str, Any]]:
    """Of one answer. Raises NotApplicable where the model never makes more than one."""
    content = "I need the weather in Paris, the weather in Rome, and the time in Oslo. Call a tool for each."
    messages = [{"role": "user", "content": content}]
    for seed in range(4):
        choice = await choice_of(
            server,
            messages=messages,
            tool_choice="required",
            temperature=1,
            seed=seed,
            parallel_tool_calls=True,
        )
        calls: list[dict[str, Any]] = choice["message"].get("tool_calls") or []
        if len(calls) > 1:
            return calls
    raise NotApplicable("the model makes one call at a time")


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
    check_in(document["choices"][0]["finish_reason"], ("stop", "length"), "finish_reason")


@row
async def auto_leaves_it_to_the_model(server: Server) -> None:
    """tool_choice auto, and none given, are taken; calls are well-formed, and told by finish_reason."""
    for fields in ({"tool_choice": "auto"}, {}):
        document = (await server.chat(**fields_of(max_tokens=64, **fields))).ok("tool").json
        choice = document["choices"][0]
        calls = choice["message"].get("tool_calls") or []
        for call in calls:
            check(call["id"] and isinstance(call["function"]["arguments"], str), f"a call is {call}")
        if choice["finish_reason"] != "length":
            expected = "tool_calls" if calls else "stop"
            check_equal(choice["finish_reason"], expected, "finish_reason")


@row
async def an_automatic_stream_is_the_whole_answer(server: Server) -> None:
    """With tool_choice auto the deltas add up to the whole answer's content and calls."""
    fields = fields_of(tool_choice="auto", max_tokens=64)
    message = (await server.chat(**fields)).ok("tool").json["choices"][0]["message"]
    stream = (await server.chat_stream(**fields)).ok("tool")
    check_equal(stream.texts[0], message["content"] or "", "the streamed content")
    expected = [call["function"] for call in message.get("tool_calls") or []]
    check_equal([call["function"] for call in streamed_calls(stream)], expected, "the streamed calls")


@row
async def streamed_pieces_add_up(server: Server) -> None:
    """The first delta of a call has id and name, all together have the arguments of the whole answer."""
    whole = await choice_of(server, tool_choice="required")
    stream = (await server.chat_stream(**fields_of(tool_choice="required"))).ok("tool")
    calls = streamed_calls(stream)
    check_calls(calls)
    expected = [call["function"] for call in whole["message"]["tool_calls"]]
    check_equal([call["function"] for call in calls], expected, "the streamed calls")
    check_equal(stream.finish_reasons[0], ["tool_calls"], "the finish reasons")


@row
async def hostile_arguments_arrive(server: Server) -> None:
    """Arguments that look like the framing of a stream, or have characters of several bytes, come whole."""
    texts = [LIKE_THE_END, LIKE_FRAMING, MANY_SCRIPTS]
    for text in texts:
        tools = [{"type": "function", "function": function("say", text)}]
        stream = (await server.chat_stream(**fields_of(tools=tools, tool_choice="required"))).ok("tool")
        if stream.finish_reasons[0] == ["length"]:
            raise NotApplicable("the model did not come to an end in time")
        for call in streamed_calls(stream):
            check_equal(json.loads(call["function"]["arguments"]), {"city": text}, "the arguments")


@row
async def ids_are_never_used_again(server: Server) -> None:
    """Calls of two answers have different ids: a history may hold both."""
    ids = [
        call["id"]
        for _ in range(2)
        for call in (await choice_of(server, tool_choice="required"))["message"]["tool_calls"]
    ]
    check_equal(len(set(ids)), len(ids), "the number of different ids")


@row
async def several_calls_are_told_apart(server: Server) -> None:
    """Calls of one answer have ids of their own, and arguments each."""
    check_calls(await several_calls(server))


@row
async def parallel_calls_can_be_forbidden(server: Server) -> None:
    """parallel_tool_calls false gives one call."""
    for seed in range(3):
        choice = await choice_of(
            server, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed
        )
        check_equal(len(choice["message"].get("tool_calls") or []), 1, "the number of calls")


@row
async def results_are_taken_back(server: Server) -> None:
    """An answer's message goes back as it came, with the tools' results behind it, and both are read."""
    message = (await choice_of(server, tool_choice="required"))["message"]
    question = {"role": "user", "content": QUESTION}
    lengths = []
    for result in ("", RAIN):
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": result} for call in message["tool_calls"]
        ]
        answer = await server.chat(**fields_of(messages=[question, message, *results], max_tokens=8))
        lengths.append(answer.ok().json["usage"]["prompt_tokens"])
    alone = (await server.chat(**fields_of(max_tokens=8))).ok().json["usage"]["prompt_tokens"]
    check(alone < lengths[0] < lengths[1], f"prompts of {alone}, {lengths[0]} and {lengths[1]} tokens")


@row
async def a_tool_may_have_no_parameters(server: Server) -> None:
    """A function without parameters is called with an empty object."""
    tools = [{"type": "function", "function": {"name": "look_outside"}}]
    calls = (await choice_of(server, tools=tools, tool_choice="required"))["message"].get("tool_calls")
    check(calls, "no tool was called")
    arguments = calls[0]["function"]["arguments"]
    check(isinstance(arguments, str), "arguments are no JSON text")
    check_equal(json.loads(arguments or "{}"), {}, "the arguments")


@row
async def no_tools_are_as_no_field(server: Server) -> None:
    """An empty list of tools, or null, changes nothing."""
    plain = (await server.chat()).ok().json["choices"][0]["message"]
    nothing: tuple[list[Any] | None, ...] = ([], None)
    for tools in nothing:
        found = (await server.chat(tools=tools)).ok().json["choices"][0]["message"]
        check_equal(found, plain, "the message")


@row
async def an_unknown_tool_is_refused(server: Server) -> None:
    """A tool_choice that names no given tool, or is none at all, is a 400."""
    unknown = {"type": "function", "function": {"name": "no_such_tool"}}
    for choice in (unknown, "perhaps", {"type": "function"}):
        (await server.chat(**fields_of(tool_choice=choice))).refused(400, param="tool_choice")


@row
async def a_choice_needs_tools(server: Server) -> None:
    """tool_choice required without tools is a 400."""
    (await server.chat(tool_choice="required")).refused(400)


@row
async def wrong_tools_are_refused(server: Server) -> None:
    """Tools without a name, of an odd one, or with parameters that are no schema, are a 400 of tools."""
    for wrong in ({"type": "function", "function": {}}, {"type": "function"},
                  {"type": "function", "function": {"name": "two words"}},
                  {"type": "function", "function": {"name": "x", "parameters": "y"}}):  # fmt: skip
        (await server.chat(tools=[wrong])).refused(400, param="tools")


@row
async def wrong_results_are_refused(server: Server) -> None:
    """A tool's message without tool_call_id, and calls without a function, are a 400 of messages."""
    question = {"role": "user", "content": QUESTION}
    for wrong in (
        [{"role": "tool", "content": RAIN}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function"}]}],
        [{"role": "assistant", "content": None, "tool_calls": "all"}],
    ):
        (await server.chat(**fields_of(messages=[question, *wrong]))).refused(400, param="messages")
