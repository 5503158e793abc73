"""Tools for models whose templates know none: told in the system message, calls and results as text."""

from __future__ import annotations

import json

import pytest

from gateway.openai.conversation import Tool
from gateway.openai.tools.tool_prompt import described, with_tools_as_text
from shared.chat_template import ChatTemplate
from shared.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
ADD = Tool("add", "of two numbers", {"type": "object", "properties": {"a": {"type": "number"}}})


def calling(*arguments, content=""):
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": each}}
        for n, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text, number=0):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def test_the_signatures_stand_in_a_system_message():
    [system, user] = with_tools_as_text([USER], [described(ADD), described(Tool("now"))])
    assert user == USER
    assert system["role"] == "system"
    signatures = system["content"].partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in signatures.split("\n")] == [described(ADD), described(Tool("now"))]


def test_what_the_system_says_by_itself_comes_first():
    [system, _] = with_tools_as_text([{"role": "system", "content": "Be {brief}."}, USER], [described(ADD)])
    assert system["content"].startswith("Be {brief}.\n\n")
    assert "<tools>" in system["content"]


def test_earlier_calls_and_results_are_text_in_roles_that_every_template_knows():
    messages = [USER, calling({"a": "é"}, {"a": 2}, content="Let me see."), result("4"), result("5", 1), USER]
    written = with_tools_as_text(messages, [])
    assert [message["role"] for message in written] == ["user", "assistant", "user", "user"]
    assert written[1] == {
        "role": "assistant",
        "content": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    }
    both = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert written[2] == {"role": "user", "content": both}


def test_a_conversation_without_tools_stays_as_it_is():
    assert with_tools_as_text([USER], []) == [USER]


def test_a_template_that_knows_tools_gets_them():
    template = ChatTemplate("{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}", {})
    assert template.takes_tools
    assert template.render([USER], tools=[described(ADD), described(Tool("now"))]) == "add;now;"
    assert template.render([USER]) == ""


@pytest.mark.parametrize(
    ("source", "takes_tools"),
    [
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ messages }}", True),
        ("{% if custom %}{% set tools = custom %}{% endif %}{% if tools %}x{% endif %}", True),
        ("You can use tools. {{ messages }}", False),
        ("{# tools #}{{ messages[0].tools }}", False),
    ],
)
def test_whether_a_template_knows_tools_is_a_matter_of_its_variables(source, takes_tools):
    assert ChatTemplate(source, {}).takes_tools == takes_tools


CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("said", ["It is", "It is ", "<end>", "hi", "é\n\n"])
def test_the_last_message_can_be_continued(said):
    messages = [{"role": "user", "content": "It is what?"}, {"role": "assistant", "content": said}]
    prompt = ChatTemplate(CHAT, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == f"<user>It is what?<end><assistant>{said}"


def test_a_template_that_changes_the_last_message_cannot_continue_it():
    messages = [USER, {"role": "assistant", "content": "four"}]
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("{{ messages[0].content }}", {}).render(messages, continue_final_message=True)
    assert refused.value.param == "continue_final_message"
