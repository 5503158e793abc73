"""Bodies of chats with tools, and the template's variables, checked at the door."""

from __future__ import annotations

import json

import pytest

from gateway.errors import ApiError
from gateway.openai.schema import ChatCompletionBody, check_body
from shared.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}


def tool(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def body(**fields):
    return {"model": "m", "messages": [USER], **fields}


def called(arguments, name="f"):
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("document", "param"),
    [
        (body(tools={}), "tools"),
        (body(tools=[tool("a b")]), "tools[0].function.name"),
        (body(tools=[tool("x" * 65)]), "tools[0].function.name"),
        (body(tools=[tool(parameters={"type": "array"})]), "tools[0].function.parameters"),
        (body(tools=[{"type": "web_search"}]), "tools[0].type"),
        (body(tools=[tool(), tool()]), "tools"),
        (body(tools=[tool(f"f{number}") for number in range(129)]), "tools"),
        (body(tool_choice="required"), "tool_choice"),
        (body(tool_choice=NAMED), "tool_choice"),
        (body(tools=[tool()], tool_choice=NAMED), "tool_choice"),
        (body(tools=[tool()], tool_choice="required", use_beam_search=True), "tool_choice"),
        (body(tools=[tool(strict=True)], use_beam_search=True), "tools"),
        (
            body(tools=[tool()], tool_choice="required", structured_outputs={"regex": "a"}),
            "structured_outputs",
        ),
        (body(messages=[USER, called("{")]), "messages[1].tool_calls[0].function.arguments"),
        (body(messages=[USER, called("[1]")]), "messages[1].tool_calls[0].function.arguments"),
        (body(messages=[USER, called("[" * 5000)]), "messages[1].tool_calls[0].function.arguments"),
        (body(messages=[{"role": "tool", "content": "4"}]), "messages[0].tool_call_id"),
        (body(messages=[{**USER, "tool_call_id": "call_1"}]), "messages[0].tool_call_id"),
        (body(messages=[{**called("{}"), "role": "user"}]), "messages[0].tool_calls"),
        (body(chat_template_kwargs={"tools": []}), "chat_template_kwargs.tools"),
        (body(continue_final_message=True), "continue_final_message"),
        (
            body(
                messages=[{"role": "assistant", "content": "a"}],
                continue_final_message=True,
                add_generation_prompt=True,
            ),
            "continue_final_message",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_the_field_named(document, param):
    with pytest.raises(ApiError) as refused:
        check_body(ChatCompletionBody, document)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_its_place(kind):
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {}}]
    with pytest.raises(ApiError, match="text only") as refused:
        check_body(ChatCompletionBody, body(messages=[{"role": "user", "content": parts}]))
    assert refused.value.param == "messages[0].content[1]"


def test_a_conversation_with_tools_is_told_as_templates_want_it():
    messages = [USER, called('{"a": 1}'), {"role": "tool", "content": "4", "tool_call_id": "call_1"}]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    document = body(
        messages=messages,
        tools=[tool("f", parameters=parameters, strict=True), tool("g")],
        tool_choice=NAMED,
        parallel_tool_calls=False,
    )
    conversation = check_body(ChatCompletionBody, document).conversation
    function = {"name": "f", "arguments": {"a": 1}}
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert conversation.messages[2] == messages[2]
    assert [(one.name, one.is_strict, one.parameters) for one in conversation.tools] == [
        ("f", True, parameters),
        ("g", False, None),
    ]
    assert (conversation.tool_choice, conversation.only_tool) == ("required", "g")
    assert not conversation.parallel_tool_calls


def test_what_was_thought_goes_to_the_template_under_one_name():
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "4", name: "2 and 2"}
        conversation = check_body(ChatCompletionBody, body(messages=[USER, message])).conversation
        assert conversation.messages[1]["reasoning_content"] == "2 and 2"


def test_variables_reach_the_template_but_replace_nothing_of_ours():
    source = "{{ bos_token }}{{ mood }}{{ messages[0].content }}{{ add_generation_prompt }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    variables = {"mood": "kind ", "self": 1, "messages": [], "bos_token": "</s>"}
    rendered = template.render([USER], add_generation_prompt=False, variables=variables)
    assert rendered == "<s>kind hiFalse"


def test_variables_with_any_name_that_json_allows_are_harmless():
    variables = json.loads('{"self": 1, "": 2, "a b": 3, "loop": 4, "range": 5}')
    assert ChatTemplate("{{ messages[0].content }}", {}).render([USER], variables=variables) == "hi"
