"""What `/v1/responses` takes, and what it becomes for a chat model."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.openai.responses.body import ResponsesBody
from gateway.openai.responses.translation import FIELDS, chat_body_of, messages_of
from gateway.openai.schema import check_body


def body(**fields) -> ResponsesBody:
    return check_body(ResponsesBody, {"model": "m", "input": "hi", **fields})


def text(kind, text):
    return {"type": kind, "text": text}


def stored(items):
    return [item.stored() for item in body(input=items).input]


def refusal(**fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        body(**fields)
    return caught.value


def test_a_turn_of_the_assistant_is_one_message_whatever_items_it_came_in():
    items = stored(
        [
            {"role": "user", "content": [text("input_text", "weather in "), text("text", "Bern?")]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("reasoning_text", "hm")]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": None,
             "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "function_call_output", "call_id": "c2", "output": [text("input_text", "rain")]},
            {"role": "user", "content": "and now?"},
        ]
    )  # fmt: skip
    assert messages_of(items, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather in Bern?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"a":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "user", "content": "and now?"},
    ]


def test_thoughts_that_were_cut_off_are_no_message():
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert messages_of(stored([{"role": "user", "content": "a"}, thought]), None) == [
        {"role": "user", "content": "a"}
    ]


def test_two_turns_of_the_assistant_stay_two():
    said = [{"role": "assistant", "content": text} for text in ("one", "two")]
    assert [message["content"] for message in messages_of(stored(said), None)] == ["one", "two"]


def test_every_field_becomes_what_chat_completions_call_it():
    asked = body(
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        max_output_tokens=7,
        temperature=0.5,
        seed=3,
        top_k=5,
        stop=["x"],
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )  # fmt: skip
    chat = chat_body_of(asked, stored([{"role": "user", "content": "hi"}]))
    assert (chat.max_output_tokens, chat.temperature, chat.seed, chat.top_k) == (7, 0.5, 3, 5)
    assert chat.stop_strings == ["x"]
    assert chat.num_logprobs == 2
    conversation = chat.conversation
    assert [message["role"] for message in conversation.messages] == ["system", "user"]
    assert (conversation.only_tool, conversation.parallel_tool_calls) == ("f", False)
    assert [(tool.name, tool.is_strict) for tool in conversation.tools] == [("f", True)]


def test_a_form_of_the_text_is_the_chat_form():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "s", "schema": schema, "strict": True}
    chat = chat_body_of(body(text={"format": form}), stored([{"role": "user", "content": "hi"}]))
    assert chat.form is not None
    assert chat.form.kind == "json_schema"
    assert chat.form.is_strict


def test_null_means_what_leaving_out_means():
    nulls = dict.fromkeys(
        ("store", "text", "include", "tools", "reasoning", "truncation", "background", "stream")
    )
    assert body(**nulls, top_k=None) == body()


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"background": True, "stream": True}, "stream", "not streamed"),
        ({"background": True, "store": False}, "store", "background"),
        ({"background": 1}, "background", "bool"),
        ({"truncation": "auto"}, "truncation", "cut"),
        ({"nonsense": 1}, "nonsense", "Unrecognized"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'allowed_tools'"),
        ({"tool_choice": "maybe"}, "tool_choice", "'none'"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]", "'web_search_call'"),
        ({"input": [{"role": "user", "content": [text("input_text", "a"), {"type": "input_image"}]}]},
         "input[0].content[1]", "'input_image'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
         "input[0].content[0]", "'input_file'"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "list"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "'user'"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 7}, "input", "list"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "Missing"),
        ({"input": [5]}, "input[0]", "message"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": ["everything"]}, "include[0]", ""),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", ""),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "needs"),
        ({"metadata": {"a": 5}}, "metadata.a", "string"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ""),
        ({"max_tokens": 5}, "max_tokens", "Unrecognized"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_name(fields, param, word):
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param), error.message
    assert word in error.message


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("messages", "input"),
        ("messages[2].tool_calls[0].function.arguments", "input"),
        ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("tools[1].function.name", "tools[1].name"),
        ("tools[1].function", "tools[1]"),
        ("temperature", "temperature"),
    ],
)
def test_a_refusal_names_the_field_of_this_api(theirs, ours):
    error = ApiError(400, f"Invalid value for {theirs}: no", kind="invalid_request_error", param=theirs)
    told = FIELDS.renamed(error)
    assert told.param == ours
    assert told.message == f"Invalid value for {ours}: no"
