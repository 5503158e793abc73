"""Faults of tool calls in `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.conformance.faults.planted import Planted, at, misnames, reads, streams, takes, tells
from tests.conformance.faults.responses import PATH
from tests.conformance.wrong_server import Asked

REQUIRED = at(PATH, tool_choice="required")
NAMED = {"type": "function", "name": "get_time"}


def each_call(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def changed(document: dict[str, Any]) -> None:
        for item in document["output"]:
            if item["type"] == "function_call":
                change(item)

    return changed


def as_object(item: dict[str, Any]) -> None:
    item["arguments"] = json.loads(item["arguments"])


def of_another_name(item: dict[str, Any]) -> None:
    item["name"] = "get_weather"


def calls_all_the_same(document: dict[str, Any]) -> None:
    call = {"id": "fc_1", "call_id": "call_1", "name": "get_time", "arguments": "{}"}
    document["output"].append({"type": "function_call", "status": "completed", **call})


def no_arguments_when_done(document: dict[str, Any]) -> None:
    if document["type"] == "response.function_call_arguments.done":
        document["arguments"] = ""


def without_results(document: dict[str, Any]) -> None:
    for item in document["input"]:
        if item.get("type") == "function_call_output":
            item["output"] = ""


def has_results(asked: Asked) -> bool:
    return at(PATH, max_output_tokens=16)(asked) and b"function_call_output" in asked.body


def has_wrong_tool(asked: Asked) -> bool:
    return at(PATH)(asked) and b'"parameters": "y"' in asked.body


FAULTS: list[Planted] = [
    tells(
        "arguments of items are an object",
        lambda asked: REQUIRED(asked) and not {"store", "parallel_tool_calls"} & set(asked.document),
        each_call(as_object),
        "responses-tools.a-tool-is-called",
    ),
    tells(
        "a tool named in a response is a hint",
        at(PATH, tool_choice=NAMED),
        each_call(of_another_name),
        "responses-tools.a-named-tool-is-called",
    ),
    tells(
        "a response calls all the same",
        at(PATH, tool_choice="none"),
        calls_all_the_same,
        "responses-tools.none-calls-no-tool",
    ),
    tells(
        "a response has no tools",
        at(PATH, tool_choice="auto"),
        lambda document: document.update(tools=[]),
        "responses-tools.tools-are-told-back",
    ),
    tells(
        "a response calls twice",
        at(PATH, parallel_tool_calls=False),
        lambda document: document["output"].extend(document["output"][-1:]),
        "responses-tools.parallel-calls-can-be-forbidden",
    ),
    streams(
        "what is done has no arguments",
        at(PATH),
        no_arguments_when_done,
        "responses-tools.streamed-arguments-add-up",
    ),
    reads(
        "results in responses are left out",
        has_results,
        without_results,
        "responses-tools.results-are-taken-back",
    ),
    takes(
        "an unknown tool of responses",
        lambda asked: at(PATH)(asked) and b"no_such_tool" in asked.body,
        "responses-tools.an-unknown-tool-is-refused",
    ),
    misnames("a wrong tool of responses", has_wrong_tool, "responses-tools.wrong-tools-are-refused"),
]
