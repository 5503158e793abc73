"""What a body of Anthropic's asks of a chat model, and what is refused in its own words."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic.body import CountTokensBody, MessagesBody
from gateway.anthropic.translation import FIELDS, chat_body_of
from gateway.errors import ApiError, invalid_request
from gateway.openai.schema import check_body
from gateway.openai.unknown_fields import check_without_unknown

HI = {"role": "user", "content": "hi"}
WEATHER = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}}


def body(**fields):
    return {"model": "m", "max_tokens": 16, "messages": [HI], **fields}


def text(text, **fields):
    return {"type": "text", "text": text, **fields}


def result(**fields):
    return {"type": "tool_result", "tool_use_id": "toolu_1", **fields}


def wish(**fields):
    return chat_body_of(check_body(MessagesBody, body(**fields)))


def told(*messages, **fields):
    """The messages as a chat template gets them."""
    return wish(messages=list(messages), **fields).conversation.messages


def refusal(document, kind=MessagesBody) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_body(kind, document)
    assert caught.value.status == 400
    return caught.value


def test_system_text_comes_first_whether_whole_or_in_blocks():
    blocks = [text("Be kind.", cache_control={"type": "ephemeral", "ttl": "1h"}), text("Be short.")]
    assert told(HI, system="Be kind.\nBe short.") == told(HI, system=blocks)
    assert told(HI, system="Be kind.")[0] == {"role": "system", "content": "Be kind."}


def test_neighbours_of_one_role_are_one_turn():
    said = [
        HI,
        {"role": "user", "content": [text("there"), text("you")]},
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": [text("lo"), text("!")]},
        {"role": "user", "content": "bye"},
    ]
    assert told(*said) == [
        {"role": "user", "content": "hi\nthere\nyou"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "bye"},
    ]


def test_calls_thoughts_and_results_become_what_templates_know():
    messages = told(
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Ulm, then.", "signature": ""},
                text("Let me see."),
                CALL,
            ],
        },
        {"role": "user", "content": [result(content=[text("sun"), text("20 °C")]), text("And?")]},
    )
    assert messages == [
        HI,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Ulm, then.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Ulm"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sun\n20 °C"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "sun"}, "sun"),
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": "sun", "is_error": False}, "sun"),
    ],
)
def test_a_result_may_be_a_text_nothing_or_an_error(fields, expected):
    messages = told(
        HI, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result(**fields)]}
    )
    assert messages[1]["content"] == ""
    assert messages[2]["content"] == expected


def test_a_last_message_of_the_assistant_is_to_be_continued():
    asked = wish(messages=[HI, {"role": "assistant", "content": "The answer is ("}])
    assert asked.continue_final_message
    assert not asked.conversation.add_generation_prompt
    assert not wish().continue_final_message


def test_a_last_message_of_the_assistant_that_says_nothing_is_none():
    for nothing in ("", [], [text("")]):
        asked = wish(messages=[HI, {"role": "assistant", "content": nothing}])
        assert asked.conversation.messages == [HI]
        assert not asked.continue_final_message


def test_sampling_fields_get_the_names_of_chat_completions():
    asked = wish(stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=7, metadata={"user_id": "u1"})
    assert (asked.max_tokens, asked.stop, asked.temperature) == (16, ["a", "b"], 0.5)
    assert (asked.top_p, asked.top_k, asked.user) == (0.9, 7, "u1")
    assert wish(stop_sequences=[]).stop_strings == []
    assert wish(top_k=None, temperature=None, metadata=None).top_k == 0


def test_the_user_of_a_body_is_known_before_it_is_translated():
    """Sticky routes go by it."""
    assert check_body(MessagesBody, body(metadata={"user_id": "u1"})).user == "u1"
    assert check_body(MessagesBody, body(metadata={"user_id": None})).user is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "weather"}, ("required", "weather", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_tools_and_the_choice_among_them(choice, expected):
    conversation = wish(tools=[WEATHER], tool_choice=choice).conversation
    assert (conversation.tool_choice, conversation.only_tool, conversation.parallel_tool_calls) == expected
    [tool] = conversation.tools
    assert (tool.name, tool.description) == ("weather", "Of a city.")
    assert tool.parameters == WEATHER["input_schema"]
    assert not tool.is_strict
    assert wish(tools=[{**WEATHER, "type": "custom", "strict": True}]).conversation.tools[0].is_strict


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        (None, {}),
    ],
)
def test_thinking_is_said_to_templates_under_the_name_that_they_know(thinking, expected):
    assert wish(thinking=thinking).conversation.template_variables == expected


def test_a_schema_for_the_output_is_held_to_strictly():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = wish(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"}).form
    assert (form.kind, json.loads(form.text), form.is_strict) == ("json_schema", schema, True)


@pytest.mark.parametrize(
    ("document", "param", "word"),
    [
        ([], None, "object"),
        ({"model": "m", "messages": [HI]}, "max_tokens", "Missing"),
        (body(max_tokens=0), "max_tokens", "greater"),
        (body(messages=[]), "messages", "at least 1"),
        (body(messages=[{"role": "bot", "content": "x"}]), "messages[0].role", "user"),
        (body(messages=[{"role": "user"}]), "messages[0].content", "Missing"),
        (body(temperature=1.5), "temperature", "less than"),
        (body(top_p=0), "top_p", "greater"),
        (body(top_k=-1), "top_k", "greater"),
        (body(stop_sequences=[""]), "stop_sequences[0]", "at least 1"),
        (body(stop_sequences="x"), "stop_sequences", "list"),
        (body(temprature=1), "temprature", "Unrecognized"),
        (body(user="u"), "user", "Unrecognized"),
        (body(frequency_penalty=1), "frequency_penalty", "Unrecognized"),
        (body(container="c1"), "container", "None"),
        (body(thread={"type": "create"}), "thread", "not kept"),
        (body(mcp_servers=[]), "mcp_servers", "Unrecognized"),
        (body(metadata={"user_id": 7}), "metadata.user_id", "string"),
        (body(metadata={"name": "x"}), "metadata.name", "Unrecognized"),
        (body(thinking={"type": "always"}), "thinking.type", "enabled"),
        (
            body(messages=[HI, {"role": "user", "content": [text("x"), {"type": "image", "source": {}}]}]),
            "messages[1].content[1]",
            "images",
        ),
        (
            body(messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}]),
            "messages[0].content[0]",
            "documents",
        ),
        (
            body(messages=[{"role": "user", "content": [{"type": "server_tool_use"}]}]),
            "messages[0].content[0]",
            "server_tool_use",
        ),
        (
            body(messages=[{"role": "user", "content": [{"text": "x"}]}]),
            "messages[0].content[0]",
            "type",
        ),
        (
            body(messages=[{"role": "user", "content": [text("x", weight=1)]}]),
            "messages[0].content[0].weight",
            "Unrecognized",
        ),
        (
            body(messages=[{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text",
            "Missing",
        ),
        (
            body(messages=[{"role": "user", "content": [CALL]}]),
            "messages[0].content[0]",
            "assistant",
        ),
        (
            body(
                messages=[
                    HI,
                    {"role": "assistant", "content": [CALL]},
                    {"role": "user", "content": [result(content=[{"type": "image", "source": {}}])]},
                ]
            ),
            "messages[2].content[0].content[0]",
            "images",
        ),
        (
            body(messages=[HI, {"role": "user", "content": [result(content="sun")]}]),
            "messages[1].content[0].tool_use_id",
            "toolu_1",
        ),
        (
            body(messages=[HI, {"role": "assistant", "content": [text("x"), CALL]}]),
            "messages[1]",
            "tool_result",
        ),
        (
            body(messages=[HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]),
            "messages[1]",
            "thought",
        ),
        (
            body(
                messages=[
                    HI,
                    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("y")]},
                ]
            ),
            "messages[1].content[0]",
            "redacted",
        ),
        (body(system=[{"type": "image"}]), "system[0].type", "text"),
        (body(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools[0].type", "bash_20250124"),
        (body(tools=[{"name": "a b", "input_schema": {}}]), "tools[0].name", "pattern"),
        (body(tools=[{"name": "a"}]), "tools[0].input_schema", "Missing"),
        (body(tools=[{"name": "a", "input_schema": {"type": "array"}}]), "tools[0].input_schema", "object"),
        (body(tools=[WEATHER], tool_choice={"type": "tool"}), "tool_choice.name", "tool"),
        (body(tools=[WEATHER], tool_choice="auto"), "tool_choice", "dictionary"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(document, param, word):
    error = refusal(document)
    assert error.param == param
    assert word in error.message


def test_counting_knows_no_fields_of_answering():
    check_body(CountTokensBody, {"model": "m", "messages": [HI], "tools": [WEATHER]})
    assert refusal({"model": "m", "messages": [HI], "max_tokens": 1}, CountTokensBody).param == "max_tokens"


def test_unknown_fields_may_be_left_out_and_told():
    found, ignored = check_without_unknown(
        MessagesBody,
        body(user="u", weight=1, messages=[{"role": "user", "content": [text("hi", weight=1)]}]),
    )
    assert set(ignored) == {"user", "weight", "messages[0].content[0].weight"}
    assert found.user is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("tools[3].function.parameters.properties", "tools[3].input_schema.properties"),
        ("tools[3].function.name", "tools[3].name"),
        ("tools", "tools"),
        ("messages[2].content", "messages"),
        ("messages", "messages"),
        ("max_tokens", "max_tokens"),
        ("response_format", "output_config.format"),
        ("continue_final_message", "messages"),
        (None, None),
    ],
)
def test_refusals_of_the_chat_are_told_in_the_words_of_this_api(theirs, ours):
    with pytest.raises(ApiError) as caught, FIELDS.in_our_words():
        raise invalid_request(f"Invalid value for {theirs}: no.", theirs, "invalid_value")
    error = caught.value
    assert (error.param, error.code) == (ours, "invalid_value")
    assert error.message == f"Invalid value for {ours}: no."


def test_nothing_to_answer_is_refused():
    with pytest.raises(ApiError) as caught:
        wish(messages=[{"role": "assistant", "content": ""}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_choice_without_tools_is_refused_under_its_own_name():
    with pytest.raises(ApiError) as caught:
        wish(tool_choice={"type": "any"})
    assert caught.value.param == "tool_choice"


def blocks_of(content):
    return [text(content)] if isinstance(content, str) else content


texts = st.text(max_size=12)
user_blocks = st.lists(texts.map(text), min_size=1, max_size=3)
messages_of_any_order = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant"]),
        texts | user_blocks,
    ),
    min_size=1,
    max_size=8,
)


@given(messages_of_any_order)
def test_turns_alternate_and_nothing_that_was_said_is_lost(messages):
    messages = [HI, *messages]
    asked = wish(messages=messages)
    roles = [message["role"] for message in asked.conversation.messages]
    assert all(one != other for one, other in itertools.pairwise(roles))
    pieces = [block["text"] for message in messages for block in blocks_of(message["content"])]
    said = "".join(message["content"] for message in asked.conversation.messages)
    assert said.replace("\n", "") == "".join(pieces).replace("\n", "")
    assert asked.continue_final_message == (roles[-1] == "assistant")
