"""What a chat's turn is planned to be: told tools, held to a form, read by whom."""

from __future__ import annotations

import json

import pytest

from gateway.errors import ApiError
from gateway.openai.api import encode_chat, plan_turn_of_chat
from gateway.openai.schema import ChatCompletionBody, check_body
from gateway.text_delta import TextDelta
from shared.config import ModelConfig
from tests.unit.chat_models import PLAIN_TEMPLATE, speaker, text_bundle

USER = {"role": "user", "content": "What is 2 + 2?"}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}}

QWEN = PLAIN_TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
MISTRAL = PLAIN_TEMPLATE + "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}"
LLAMA = PLAIN_TEMPLATE + "{% if tools %}{{ tools | tojson }}<|python_tag|>{% endif %}"
PYTHONIC = PLAIN_TEMPLATE + "{% if tools %}{{ tools | tojson }}[f(a=1)]{% endif %}"
CODER = PLAIN_TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call><function=f>{% endif %}"
THINKING = PLAIN_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"


def tool(name="add", **fields):
    return {"type": "function", "function": {"name": name, "parameters": ADD, **fields}}


class Turn:
    """A request as the gateway plans it."""

    def __init__(self, bundle=None, config=None, **fields):
        document = {"model": "m", "messages": [USER], **fields}
        body = check_body(ChatCompletionBody, document)
        self.speaker = speaker(
            bundle or text_bundle(), config and ModelConfig(name="m", source="s", **config)
        )
        self.prompts = encode_chat(body, self.speaker, "")
        self.plan = plan_turn_of_chat(body, self.speaker, self.prompts)

    @property
    def prompt(self) -> str:
        return self.speaker.tokenizer.decode(self.prompts[0].token_ids, skip_special_tokens=False)

    def read(self, *pieces, finish_reason="stop"):
        """(thoughts, text, calls) of what the model writes."""
        assert self.plan.make_reader is not None
        reader = self.plan.make_reader()
        deltas = [TextDelta(0, piece, None) for piece in pieces] + [TextDelta(0, "", finish_reason)]
        read = [part for delta in deltas for part in reader.read(delta)]
        assert [delta.finish_reason for delta in read if delta.finish_reason] == [finish_reason]
        calls: dict[int, list[str]] = {}
        for call in [call for delta in read for call in delta.tool_calls]:
            if call.call_id is not None:
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
        return (
            "".join(delta.reasoning for delta in read),
            "".join(delta.text for delta in read),
            [(name, json.loads(arguments)) for name, arguments in calls.values()],
        )


def refusal(**fields):
    with pytest.raises(ApiError) as refused:
        Turn(**fields)
    return refused.value


def test_a_chat_without_tools_has_no_reader():
    assert Turn().plan.make_reader is None


def test_a_model_whose_template_knows_no_tools_is_told_in_the_system_message():
    turn = Turn(tools=[tool(description="of two numbers")])
    assert turn.prompt.startswith("[system] ")
    assert '"description": "of two numbers"' in turn.prompt
    assert turn.read('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>') == (
        "",
        "",
        [("add", {"a": 1})],
    )


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (QWEN, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
        (MISTRAL + "{# [ARGS] #}", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}'),
        (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        (PYTHONIC, "[add(a=1)]"),
    ],
)
def test_calls_are_read_in_the_form_that_the_template_tells(template, written):
    special = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
    turn = Turn(text_bundle(template, special=special), tools=[tool()])
    assert '"name": "add"' in turn.prompt
    assert turn.read(written) == ("", "", [("add", {"a": 1})])
    assert turn.read("It is ", "4.") == ("", "It is 4.", [])


def test_markers_that_are_special_tokens_reach_the_reader_and_the_others_do_not():
    bundle = text_bundle(MISTRAL, special=["[TOOL_CALLS]", "[INST]"])
    turn = Turn(bundle, tools=[tool()])
    tokenizer, kept = turn.speaker.tokenizer, turn.plan.kept_special_tokens
    written = tokenizer.encode("a[INST][TOOL_CALLS]b<end>")
    assert tokenizer.decode(written, kept_special_tokens=kept) == "a[TOOL_CALLS]b"
    assert tokenizer.decode(written) == "ab"


def test_a_configured_form_goes_before_that_of_the_template():
    turn = Turn(text_bundle(QWEN), {"tool_call_parser": "pythonic"}, tools=[tool()])
    assert turn.read("[add(a=1)]") == ("", "", [("add", {"a": 1})])


@pytest.mark.parametrize(
    ("bundle", "config"),
    [(text_bundle(CODER), None), (text_bundle(PLAIN_TEMPLATE + "{{ tools }}"), None), (None, "none")],
)
def test_a_model_that_calls_in_no_known_form_refuses_tools(bundle, config):
    error = refusal(bundle=bundle, config=config and {"tool_call_parser": config}, tools=[tool()])
    assert (error.status, error.param, error.code) == (400, "tools", "unsupported_parameter")
    assert "tool_call_parser" in error.message


def test_whom_the_client_forbids_to_call_is_not_told_of_tools():
    turn = Turn(tools=[tool()], tool_choice="none")
    assert (turn.prompt, turn.plan.make_reader) == (Turn().prompt, None)


def test_a_call_is_forced_by_a_grammar_that_a_refusal_names_the_tools_for():
    required = Turn(tools=[tool(), tool("sub")], tool_choice="required").plan
    named = Turn(tools=[tool(), tool("sub")], tool_choice=NAMED).plan
    assert required.form.kind == named.form.kind == "schemas"
    assert required.form_param == named.form_param == "tools"
    assert "sub" in required.form.text
    assert "sub" not in named.form.text


def test_a_forced_call_that_is_cut_off_before_its_arguments_is_no_text():
    assert Turn(tools=[tool()], tool_choice="required").read(
        '<tool_call>\n{"name": "ad', finish_reason="length"
    ) == ("", "", [])


def test_a_name_that_is_no_keyword_of_python_is_refused_where_it_would_have_to_be_one():
    parameters = {"type": "object", "properties": {"a b": {"type": "integer"}}}
    fields = {"tools": [tool(parameters=parameters)], "tool_choice": "required"}
    error = refusal(bundle=text_bundle(PYTHONIC), **fields)
    assert (error.status, error.param) == (400, "tools")
    assert "'a b'" in error.message
    assert Turn(text_bundle(QWEN), **fields).plan.form is not None


def test_only_strict_tools_hold_a_model_that_may_call():
    assert Turn(tools=[tool()]).plan.form is None
    assert Turn(tools=[tool(strict=True)]).plan.form.kind == "schemas"


def test_who_may_call_or_answer_in_a_form_is_held_to_one_of_them():
    form = Turn(tools=[tool()], response_format=SCHEMA).plan.form
    assert form.kind == "schemas"
    assert "answer: %json" in form.text


def test_more_calls_than_wanted_are_left_out():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>\n'
    both = call % 1 + call % 2
    assert len(Turn(tools=[tool()]).read(both)[2]) == 2
    assert Turn(tools=[tool()], parallel_tool_calls=False).read(both)[2] == [("add", {"a": 1})]


def test_each_call_has_an_id_of_its_own_in_the_form_that_the_model_knows():
    lengths = []
    for template in (QWEN, MISTRAL):
        reader = Turn(text_bundle(template), tools=[tool()]).plan.make_reader()
        text = '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]'
        if template is QWEN:
            text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n' * 2
        calls = [call for delta in reader.read(TextDelta(0, text, "stop")) for call in delta.tool_calls]
        ids = {call.call_id for call in calls if call.call_id}
        assert len(ids) == 2
        lengths.append({len(call_id) for call_id in ids})
    assert lengths == [{29}, {9}]


def test_text_behind_a_call_stays_behind_it():
    reader = Turn(tools=[tool()]).plan.make_reader()
    text = 'a<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>b'
    read = reader.read(TextDelta(0, text, "stop", num_tokens=9, stop_reason="x"))
    assert [(delta.text, len(delta.tool_calls)) for delta in read] == [("a", 1), ("b", 0)]
    assert [(delta.num_tokens, delta.finish_reason, delta.stop_reason) for delta in read] == [
        (9, None, None),
        (0, "stop", "x"),
    ]


def test_thoughts_that_the_template_opens_are_told_from_the_answer():
    turn = Turn(text_bundle(THINKING))
    assert turn.read("So", " so.\n</think>\n", "\n4") == ("So so.", "4", [])
    # With a prompt that ends otherwise, the model has to open them itself.
    assert Turn(text_bundle(THINKING), add_generation_prompt=False).read("4") == ("", "4", [])


def test_thoughts_can_be_left_out_of_the_answer():
    turn = Turn(text_bundle(THINKING), include_reasoning=False)
    assert turn.read("So\n</thi", "nk>\n\n4") == ("", "4", [])


def test_an_effort_reaches_the_template():
    bundle = text_bundle("{{ reasoning_effort }} {{ enable_thinking }} {{ messages[0].content }}")
    prompts = [
        Turn(bundle, messages=[{"role": "user", "content": "hi"}], **fields).prompt
        for fields in (
            {"reasoning_effort": "high"},
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        )
    ]
    assert prompts == ["high  hi", "none False hi", "none True hi"]


def test_thoughts_come_before_calls():
    turn = Turn(text_bundle(THINKING), tools=[tool()])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert turn.read(f"So\n</think>\n\n{call}") == ("So", "", [("add", {"a": 1})])


def test_an_answer_in_json_begins_behind_the_thoughts():
    turn = Turn(text_bundle(THINKING), response_format=SCHEMA)
    assert turn.plan.form.text.startswith("start: thoughts answer\n")
    assert turn.plan.form_param is None
    assert turn.read("So\n</think>\n4") == ("So", "4", [])


def test_a_form_that_leaves_no_room_for_thoughts_is_the_answer():
    plan = Turn(text_bundle(THINKING), structured_outputs={"choice": ["a", "b"]}).plan
    assert (plan.form.kind, plan.make_reader) == ("choice", None)


def test_tools_are_a_part_of_what_a_conversation_is_found_again_by():
    hashes = {
        Turn(tools=tools, messages=[{"role": "user", "content": "x" * 64}]).prompts[0].prefix_hash
        for tools in ([], [tool()], [tool("sub")])
    }
    assert len(hashes) == 3
    assert None not in hashes


def test_earlier_calls_reach_a_template_with_their_arguments_as_objects():
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ call.function.arguments.a }}{% endfor %}{{ message.content + '' }}{% endfor %}{{ tools or '' }}"
    )
    function = {"name": "add", "arguments": '{"a": 7}'}
    calling = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "8"}
    assert Turn(text_bundle(template), messages=[USER, calling, result]).prompt == "What is 2 + 2?78"


def test_the_last_message_is_continued():
    said = {"role": "assistant", "content": "It is "}
    turn = Turn(messages=[USER, said], continue_final_message=True)
    assert turn.prompt == "[user] What is 2 + 2?\n[assistant] It is "
