"""Anthropic's Python client, unchanged, against the default model.

(The details of this API are in tests/integration/test_messages.py, with a model that needs no weights.)
"""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import ModelInfo
from pydantic import BaseModel

from tests.clients.conftest import LONG
from tests.real_stack import ABSENT, EMBEDDER, HASTY, MODEL, RealStack

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 32,
    "extra_body": {"temperature": 0},  # a field of the API that this client no longer has
}
LONG_WORK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from one to five hundred: 1, 2, 3, 4, and so on."}],
    "max_tokens": LONG,
    "extra_body": {"temperature": 0},
}


class City(BaseModel):
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool


def client_of(stack: RealStack, tenant: str = "default", **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.url, api_key=stack.key_of(tenant), **options)


@pytest.fixture(scope="module")
def client(real_stack: RealStack) -> anthropic.Anthropic:
    return client_of(real_stack, max_retries=0, timeout=120)


def test_a_question_is_answered_streamed_and_whole(client):
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in whole.content[0].text
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "end_turn"


async def test_the_asynchronous_client_is_answered_alike(client, real_stack):
    async with anthropic.AsyncAnthropic(
        base_url=real_stack.url, api_key=real_stack.key, max_retries=0
    ) as asynchronous:
        whole = await asynchronous.messages.create(**GREEDY)
        async with asynchronous.messages.stream(**GREEDY) as stream:
            streamed = "".join([text async for text in stream.text_stream])
    assert streamed == whole.content[0].text == client.messages.create(**GREEDY).content[0].text


def test_a_pydantic_model_is_parsed_whole_and_streamed(client):
    asked = {**GREEDY, "max_tokens": 100, "output_format": City}
    whole = client.messages.parse(**asked).parsed_output
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().parsed_output
    assert isinstance(whole, City)
    assert streamed == whole


def test_counted_tokens_are_those_of_the_prompt_and_a_second_turn_reads_the_cache(client):
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.").input_tokens
    first = client.messages.create(**GREEDY, system="Be brief.")
    said = {"role": "assistant", "content": first.content}
    turns = [*QUESTION, said, {"role": "user", "content": "And of Italy?"}]
    second = client.messages.create(**{**GREEDY, "messages": turns}, system="Be brief.").usage
    assert first.usage.input_tokens + first.usage.cache_read_input_tokens == counted
    assert second.cache_read_input_tokens >= counted


def test_models_are_listed_and_found(client):
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL, EMBEDDER, ABSENT]
    found = client.models.retrieve(MODEL)
    assert found == models[0]
    ModelInfo.model_validate(found.to_dict())
    assert (found.type, found.display_name, found.max_input_tokens) == ("model", MODEL, 2048)
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nobody")


def test_a_request_that_times_out_ends_on_the_engine_too(client, given_up_early):
    with given_up_early(), pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.5).messages.create(**LONG_WORK)


def test_a_stream_that_is_left_ends_on_the_engine_too(client, given_up_early):
    with given_up_early(), client.messages.stream(**LONG_WORK) as stream:
        assert next(iter(stream.text_stream))


def test_a_rate_limit_is_waited_out_for_as_long_as_the_server_says(real_stack):
    """One more try, which comes after half a second by itself: too early."""
    hasty = client_of(real_stack, HASTY, max_retries=1).messages.with_raw_response
    hasty.count_tokens(model=MODEL, messages=QUESTION)
    assert hasty.count_tokens(model=MODEL, messages=QUESTION).retries_taken == 1


# ---------------------------------------------------------------------- tools

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ABOUT_WEATHER = {
    **GREEDY,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "max_tokens": 200,
    "tools": [WEATHER],
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_streamed_and_whole(client, choice):
    whole = client.messages.create(**ABOUT_WEATHER, tool_choice=choice)
    with client.messages.stream(**ABOUT_WEATHER, tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert {call.name for call in calls} == {"get_weather"}
    assert all(call.input["city"] in ("Paris", "Rome") for call in calls)
    streamed = [block for block in final.content if block.type == "tool_use"]
    assert [call.input for call in streamed] == [call.input for call in calls]
    assert len(list(filter(None, pieces))) > len(calls)


def test_the_result_of_a_call_is_read_in_the_next_turn(client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(**ABOUT_WEATHER, tool_choice=choice)
    [call] = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
    turns = [
        *ABOUT_WEATHER["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    asked = {**ABOUT_WEATHER, "messages": turns, "max_tokens": 16}
    told = client.messages.create(**asked, tool_choice={"type": "none"})
    assert [block.type for block in told.content] == ["text"]
    assert told.stop_reason in ("end_turn", "max_tokens")


def test_its_tool_runner_calls_a_function_of_ours(client):
    called = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        called.append(city)
        return "sunny"

    asked = {**ABOUT_WEATHER, "tools": [get_weather], "tool_choice": {"type": "any"}}
    messages = list(client.beta.messages.tool_runner(**asked, max_iterations=2))
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert called
    assert set(called) <= {"Paris", "Rome"}
