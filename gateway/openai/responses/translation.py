"""From a body of this API to what it asks of a chat model, and back to its words where that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.openai.renamed_fields import RenamedFields
from gateway.openai.responses.body import ResponsesBody
from gateway.openai.responses.items import Item
from gateway.openai.schema import ChatCompletionBody, SamplingFields, check_body

_PASSED_ON = (*SamplingFields.model_fields, "parallel_tool_calls", "chat_template_kwargs", "user")

FIELDS = RenamedFields(
    (r"messages(\W.*)?", "input"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"response_format(\W.*)?", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"(tools\[\d+\])\.function\.(.*)", r"\1.\2"),
)


def chat_body_of(body: ResponsesBody, items: Sequence[Item]) -> ChatCompletionBody:
    """`items`: the whole conversation. Raises ApiError 400 in the words of chat completions."""
    # Only what was given: defaults are then those of chat completions, and so are their checks.
    document = {name: getattr(body, name) for name in _PASSED_ON if name in body.model_fields_set}
    if body.structured_outputs is not None:
        document["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True)
    document |= {"model": body.model, "messages": messages_of(items, body.instructions)}
    if body.max_output_tokens is not None:
        document["max_completion_tokens"] = body.max_output_tokens
    if body.tells_logprobs:
        document |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None:
        document["reasoning_effort"] = body.reasoning.effort
    form = body.form_of_text
    if form["type"] == "json_schema":
        schema = {name: form[name] for name in ("name", "description", "schema", "strict")}
        document["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form["type"] == "json_object":
        document["response_format"] = {"type": "json_object"}
    if body.tools:
        document["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools
        ]
    if body.tool_choice is not None:
        choice = body.tool_choice
        document["tool_choice"] = (
            choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
        )
    return check_body(ChatCompletionBody, document)


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat. What one turn of the assistant brought (what it thought, said and called) is
    one message, as templates expect it."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None  # of the assistant, as long as items may still belong to it
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            turn = None
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(message)
        elif kind == "message" and item["role"] != "assistant":
            turn = None
            messages.append({"role": item["role"], "content": _text_of(item)})
        else:
            if turn is None or not _continues(turn, kind):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add_to_turn(turn, item)
    # Thoughts alone are no turn yet: their answer was cut off.
    return [message for message in messages if message["role"] != "assistant" or _says_something(message)]


def _continues(turn: dict[str, Any], kind: str) -> bool:
    """Whether such an item can be more of the same turn: a turn thinks first, and calls last."""
    if kind == "function_call":
        return True
    return "tool_calls" not in turn and turn["content"] is None


def _add_to_turn(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _text_of(item)
    elif item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        thought = "".join(part["text"] for part in item["content"] or item["summary"])
        if thought:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought


def _says_something(message: dict[str, Any]) -> bool:
    return message["content"] is not None or "tool_calls" in message


def _text_of(item: Item) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in item["content"])
