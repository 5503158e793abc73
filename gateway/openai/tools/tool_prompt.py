"""How a model is told of tools whose chat template does not know any: in the manner of Hermes.

The system message gets a section with the signatures; calls of earlier turns, and their results, are written
as text. A small model that never saw this form in training understands it at least from the description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.openai.conversation import Tool

_INTRODUCTION = """\
Functions can be called to help with the user's request. Their signatures, one JSON object a line:
<tools>
{signatures}
</tools>
To call a function, write its name and its arguments as a JSON object between these tags, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""

Message = Mapping[str, Any]


def described(tool: Tool) -> dict[str, Any]:
    """As chat templates expect it, which is as OpenAI has it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same conversation in messages that any chat template can show. `tools` as `described`."""
    if not tools and not any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        return list(messages)
    written: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1].get("holds_results"):
                result = f"{written.pop()['content']}\n{result}"
            written.append({"role": "user", "content": result, "holds_results": True})
        elif message.get("tool_calls"):
            calls = "\n".join(map(_call, message["tool_calls"]))
            said = message["content"]
            written.append({**_without_calls(message), "content": f"{said}\n{calls}" if said else calls})
        else:
            written.append(message)
    if tools:
        written = _introduced(written, tools)
    return [{key: value for key, value in message.items() if key != "holds_results"} for message in written]


def _introduced(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(signatures=signatures)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": introduction}, *messages]
    system, *others = messages
    said = f"{system['content']}\n\n{introduction}" if system["content"] else introduction
    return [{**system, "content": said}, *others]


def _call(call: Mapping[str, Any]) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _without_calls(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}
