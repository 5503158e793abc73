"""Faults of tool use in `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.conformance.faults.messages import PATH
from tests.conformance.faults.planted import Planted, at, reads, streams, takes, tells
from tests.conformance.wrong_server import Asked

ANY = at(PATH, tool_choice={"type": "any"}, temperature=0)


def each_use(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def changed(document: dict[str, Any]) -> None:
        for block in document["content"]:
            if block["type"] == "tool_use":
                change(block)

    return changed


def as_text(block: dict[str, Any]) -> None:
    block["input"] = json.dumps(block["input"])


def of_another_name(block: dict[str, Any]) -> None:
    block["name"] = "get_weather"


def uses_all_the_same(document: dict[str, Any]) -> None:
    document["content"].append({"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}})


def all_at_the_begin(document: dict[str, Any]) -> None:
    if document["type"] == "content_block_start" and document["content_block"]["type"] == "tool_use":
        document["content_block"]["input"] = {"city": "Oslo"}


def without_results(document: dict[str, Any]) -> None:
    for block in document["messages"][-1]["content"]:
        if block["type"] == "tool_result":
            block["content"] = ""


def has_results(asked: Asked) -> bool:
    return at(PATH, max_tokens=8)(asked) and b"tool_result" in asked.body


FAULTS: list[Planted] = [
    tells(
        "input is a text",
        ANY,
        each_use(as_text),
        "messages-tools.a-tool-is-used",
        "messages-tools.results-are-taken-back",
        "anthropic-client.a-forced-call-is-streamed-as-it-is-whole",
    ),
    tells(
        "a tool named in a message is a hint",
        at(PATH, tool_choice={"type": "tool", "name": "get_time"}),
        each_use(of_another_name),
        "messages-tools.a-named-tool-is-used",
    ),
    tells(
        "a message uses tools all the same",
        at(PATH, tool_choice={"type": "none"}),
        uses_all_the_same,
        "messages-tools.none-uses-no-tool",
    ),
    tells(
        "every message with tools is a use of them",
        at(PATH, tool_choice={"type": "auto"}),
        lambda document: document.update(stop_reason="tool_use"),
        "messages-tools.auto-leaves-it-to-the-model",
    ),
    tells(
        "a message uses a tool twice",
        at(PATH, "tool_choice", temperature=1),
        lambda document: document["content"].extend(document["content"][-1:]),
        "messages-tools.parallel-use-can-be-forbidden",
    ),
    streams("a block begins with its input", ANY, all_at_the_begin, "messages-tools.streamed-input-adds-up"),
    reads(
        "results in messages are left out",
        has_results,
        without_results,
        "messages-tools.results-are-taken-back",
    ),
    tells(
        "tools make a prompt shorter",
        lambda asked: at(f"{PATH}/count_tokens")(asked) and asked.document.get("tools"),
        lambda document: document.update(input_tokens=1),
        "messages-tools.tools-are-counted",
    ),
    takes(
        "an unknown tool of messages",
        lambda asked: at(PATH)(asked) and b"no_such_tool" in asked.body,
        "messages-tools.an-unknown-tool-is-refused",
    ),
    takes(
        "a wrong tool of messages",
        lambda asked: at(PATH)(asked) and b'"input_schema": "y"' in asked.body,
        "messages-tools.wrong-tools-are-refused",
    ),
]
