"""From a body of this API to what it asks of a chat model, and back to its words where that is refused."""

from __future__ import annotations

import json
from typing import Any

from gateway.anthropic.blocks import Message, ToolResultBlock, ToolUseBlock
from gateway.anthropic.body import ConversationFields, MessagesBody
from gateway.anthropic.tool_fields import ClientTool, ToolChoice
from gateway.errors import invalid_request
from gateway.openai.renamed_fields import RenamedFields
from gateway.openai.schema import ChatCompletionBody, check_body

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The messages of the two are not counted alike, so of a place among them only "messages" is kept.
FIELDS = RenamedFields(
    (r"messages\W.*|continue_final_message|add_generation_prompt", "messages"),
    (r"max_completion_tokens", "max_tokens"),
    (r"stop(\W.*)?", "stop_sequences"),
    (r"chat_template_kwargs(\W.*)?", "thinking"),
    (r"parallel_tool_calls", "tool_choice"),
    (r"(?:response_format|structured_outputs)(?:\W.*)?", "output_config.format"),
    (r"(tools\[\d+\])\.function\.parameters(.*)", r"\1.input_schema\2"),
    (r"(tools\[\d+\])\.function(.*)", r"\1\2"),
)


def chat_body_of(body: ConversationFields) -> ChatCompletionBody:
    """Raises ApiError 400 in the words of chat completions."""
    # Only what was given: defaults are then those of chat completions, and so are their checks.
    messages = messages_of(body)
    document: dict[str, Any] = {"model": body.model, "messages": messages, "user": body.user}
    if messages[-1]["role"] == "assistant":
        document["continue_final_message"] = True
    if body.tools:
        document["tools"] = [_function(tool) for tool in body.tools]
    if body.tool_choice is not None:
        document |= _choice_fields(body.tool_choice)
    if body.thinking is not None:
        # Under the name by which the templates of models that can think or not ask for it.
        document["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None:
        document["reasoning_effort"] = body.output_config.effort
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.json_schema, "strict": True}
        document["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        document |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
        }
    return check_body(ChatCompletionBody, document)


def messages_of(body: ConversationFields) -> list[dict[str, Any]]:
    """The messages of a chat. Neighbours of one role are one turn, as Anthropic has it. Raises ApiError 400
    if they say nothing.

    Where texts meet in a turn, those of the assistant are what it said without a break, with thoughts and
    calls taken out; those of others are pieces by themselves, and get a line each.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else "\n".join(b.text for b in body.system)
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        if message.role == "assistant":
            _add_to_assistant(messages, message)
        else:
            _add_to_others(messages, message)
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # an answer that is to begin with nothing is one like any other
    if not messages:
        raise invalid_request("There is nothing to answer.", "messages", "invalid_value")
    return messages


def _add_to_assistant(messages: list[dict[str, Any]], message: Message) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    turn = messages[-1]
    for block in message.blocks:
        if block.type == "text":
            turn["content"] = (turn["content"] or "") + block.text
        elif block.type == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
        elif block.type == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(block))
    if turn["content"] is None and "tool_calls" not in turn:
        turn["content"] = ""


def _add_to_others(messages: list[dict[str, Any]], message: Message) -> None:
    if not message.blocks:
        messages.append({"role": message.role, "content": ""})
    for block in message.blocks:
        if block.type == "tool_result":
            messages.append(_result(block))
        elif block.type == "text":
            if messages and messages[-1]["role"] == message.role:
                messages[-1]["content"] += "\n" + block.text
            else:
                messages.append({"role": message.role, "content": block.text})


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = f"Error: {block.text}" if block.is_error else block.text  # chat templates know no other way
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _function(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice_fields(choice: ToolChoice) -> dict[str, Any]:
    wanted: Any = _CHOICES.get(choice.type)
    if wanted is None:
        wanted = {"type": "function", "function": {"name": choice.name}}
    fields = {"tool_choice": wanted}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
