"""Faults of tool calls in chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.conformance.faults.planted import (
    CHAT,
    Planted,
    at,
    crashes,
    ignores,
    loses_a_piece,
    misnames,
    reads,
    refuses,
    streams,
    takes,
    tells,
)
from tests.conformance.wrong_server import Asked

REQUIRED = at(CHAT, tool_choice="required")
NAMED = {"type": "function", "function": {"name": "get_time"}}


def each_call(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """Changes the calls of whole answers, or their deltas."""

    def changed(document: dict[str, Any]) -> None:
        for choice in document["choices"]:
            for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ():
                change(call)

    return changed


def as_object(call: dict[str, Any]) -> None:
    call["function"]["arguments"] = json.loads(call["function"]["arguments"])


def of_another_name(call: dict[str, Any]) -> None:
    call["function"]["name"] = "get_weather"


def without_id(call: dict[str, Any]) -> None:
    call.pop("id", None)


def with_null(call: dict[str, Any]) -> None:
    call["function"]["arguments"] = "null"


def searched(call: dict[str, Any]) -> None:
    function = call["function"]
    function["arguments"] = function.get("arguments", "").replace("D", "")


def numbered(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        for number, call in enumerate(choice["message"].get("tool_calls") or ()):
            call["id"] = f"call_{number}"


def of_one_id(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        calls = choice["message"].get("tool_calls") or ()
        for call in calls:
            call["id"] = calls[0]["id"]


def calls_all_the_same(document: dict[str, Any]) -> None:
    function = {"name": "get_time", "arguments": '{"city":"Oslo"}'}
    document["choices"][0]["message"]["tool_calls"] = [
        {"id": "call_1", "type": "function", "function": function}
    ]


def ends_with_calls(document: dict[str, Any]) -> None:
    document["choices"][0]["finish_reason"] = "tool_calls"


def without_results(document: dict[str, Any]) -> None:
    for message in document["messages"]:
        if message["role"] == "tool":
            message["content"] = ""


def has_choice(*choices: object) -> Callable[[Asked], bool]:
    """With the two tools of most rows."""
    return lambda asked: (
        at(CHAT, "tools")(asked)
        and len(asked.document["tools"] or ()) == 2
        and asked.document.get("tool_choice") in choices
    )


def wants_several(asked: Asked) -> bool:
    return REQUIRED(asked) and b"Call a tool for each" in asked.body


def has_odd_history(asked: Asked) -> bool:
    return at(CHAT)(asked) and b'"tool_calls": "all"' in asked.body


def has_wrong_tool(asked: Asked) -> bool:
    return at(CHAT)(asked) and b"two words" in asked.body


FAULTS: list[Planted] = [
    tells(
        "arguments are an object",
        lambda asked: REQUIRED(asked) and asked.document.get("temperature") == 0,
        each_call(as_object),
        "tools.required-calls-a-tool",
        "tools.streamed-pieces-add-up",
        "tools.results-are-taken-back",
        "tools.a-tool-may-have-no-parameters",
        "openai-client.a-forced-call-is-parsed",
        "openai-js-client.a-forced-call-is-parsed",
    ),
    tells(
        "a named tool is a hint",
        at(CHAT, tool_choice=NAMED),
        each_call(of_another_name),
        "tools.a-named-tool-is-called",
    ),
    tells("calls all the same", has_choice("none"), calls_all_the_same, "tools.none-calls-no-tool"),
    tells(
        "every answer with tools ends with calls",
        has_choice(None),
        ends_with_calls,
        "tools.auto-leaves-it-to-the-model",
    ),
    loses_a_piece("chats with tools", has_choice("auto"), "tools.an-automatic-stream-is-the-whole-answer"),
    streams(
        "a call begins without an id",
        has_choice("required"),
        each_call(without_id),
        "tools.streamed-pieces-add-up",
    ),
    streams(
        "arguments are searched for the end",
        lambda asked: REQUIRED(asked) and b'"say"' in asked.body,
        each_call(searched),
        "tools.hostile-arguments-arrive",
    ),
    tells("calls are numbered", has_choice("required"), numbered, "tools.ids-are-never-used-again"),
    tells("calls share an id", wants_several, of_one_id, "tools.several-calls-are-told-apart"),
    ignores("parallel_tool_calls", at(CHAT), "tools.parallel-calls-can-be-forbidden"),
    reads(
        "results of tools are left out",
        at(CHAT, "tools", max_tokens=8),
        without_results,
        "tools.results-are-taken-back",
    ),
    tells(
        "no arguments are null",
        lambda asked: REQUIRED(asked) and b"look_outside" in asked.body,
        each_call(with_null),
        "tools.a-tool-may-have-no-parameters",
    ),
    refuses("an empty list of tools", at(CHAT, tools=[]), "tools.no-tools-are-as-no-field"),
    takes("a choice that is none", at(CHAT, tool_choice="perhaps"), "tools.an-unknown-tool-is-refused"),
    takes(
        "a choice without tools",
        lambda asked: REQUIRED(asked) and "tools" not in asked.document,
        "tools.a-choice-needs-tools",
    ),
    crashes("a name of two words", has_wrong_tool, "tools.wrong-tools-are-refused"),
    misnames("an odd history", has_odd_history, "tools.wrong-results-are-refused"),
]
