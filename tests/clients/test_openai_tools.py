"""Calls of tools, by OpenAI's Python client. The default model is small, so calls are demanded of it."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.real_stack import MODEL, RealStack

QUESTION = "What is the weather in Paris?"
MESSAGES = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


class Mill(BaseModel):
    """Where the nearest mill is."""

    river: Literal["Seine", "Tiber"]


WEATHER = openai.pydantic_function_tool(Weather, name="get_weather")
MILL = openai.pydantic_function_tool(Mill, name="find_mill")
FLAT = {"type": "function", **WEATHER["function"]}  # as /v1/responses has it
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "tools": [WEATHER, MILL],
    "tool_choice": "required",
    "temperature": 0,
    "max_tokens": 200,
}
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": QUESTION,
    "tools": [FLAT],
    "tool_choice": "required",
    "temperature": 0,
    "max_output_tokens": 200,
}


@pytest.fixture(scope="module")
def client(real_stack: RealStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=real_stack.url + "/v1", api_key=real_stack.key, max_retries=0, timeout=120)


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_call_that_is_demanded_is_made_and_its_arguments_are_parsed(client):
    [choice] = client.chat.completions.parse(**CHAT).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    kinds = {"get_weather": Weather, "find_mill": Mill}
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, kinds[call.function.name])
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)


@pytest.mark.parametrize("name", ["get_weather", "find_mill"])
def test_the_tool_that_is_named_is_called(client, name):
    [choice] = client.chat.completions.create(**{**CHAT, "tool_choice": named(name)}).choices
    assert {called for called, _ in calls_of(choice)} == {name}


def test_arguments_keep_to_a_strict_schema_at_any_temperature(client):
    asked = {**CHAT, "temperature": 1.5, "n": 4, "seed": 5, "parallel_tool_calls": False}
    for choice in client.chat.completions.create(**asked).choices:
        for name, arguments in calls_of(choice):
            (Weather if name == "get_weather" else Mill).model_validate_json(arguments)


def test_a_stream_tells_a_call_in_pieces_that_add_up_to_the_whole_one(client):
    [whole] = client.chat.completions.create(**CHAT).choices
    calls: dict[int, dict[str, Any]] = {}
    finish_reasons = []
    for chunk in client.chat.completions.create(**CHAT, stream=True):
        finish_reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "pieces": []})
            assert call["id"] in (piece.id, call["id"])
            call["pieces"].append(piece.function.arguments or "")
    assert all(call["id"] for call in calls.values())
    streamed = [(call["name"], "".join(call["pieces"])) for _, call in sorted(calls.items())]
    assert streamed == calls_of(whole)
    assert max(len(list(filter(None, call["pieces"]))) for call in calls.values()) > 1
    assert finish_reasons == ["tool_calls"]


def test_the_stream_helper_parses_the_arguments_when_they_are_complete(client):
    with client.chat.completions.stream(**CHAT) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    deltas = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(deltas) == "".join(event.arguments for event in done)
    calls = final.choices[0].message.tool_calls
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments for call in calls]
    assert calls


def test_one_call_at_a_time_if_that_is_wanted(client):
    several, one = (
        client.chat.completions.create(**CHAT, parallel_tool_calls=allowed).choices[0]
        for allowed in (True, False)
    )
    assert len(calls_of(several)) > 1
    assert calls_of(one) == calls_of(several)[:1]


def test_the_result_of_a_call_is_read_in_the_next_turn(client):
    first = client.chat.completions.create(**{**CHAT, "parallel_tool_calls": False})
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 21 degrees"}
    turn = {**CHAT, "messages": [*MESSAGES, message.to_dict(), result], "max_tokens": 16}
    free = client.chat.completions.create(**{**turn, "tool_choice": "auto"})
    assert free.choices[0].message.content or free.choices[0].message.tool_calls
    assert free.usage.prompt_tokens > first.usage.prompt_tokens
    told = client.chat.completions.create(**{**turn, "tool_choice": "none"})
    assert told.choices[0].message.content
    assert told.choices[0].message.tool_calls is None


def test_a_call_in_a_response_is_streamed_in_pieces_and_its_result_is_taken(client):
    asked = client.responses.create(**RESPONSE)
    calls = [item for item in asked.output if item.type == "function_call"]
    assert calls
    assert {call.name for call in calls} == {"get_weather"}
    for call in calls:
        Weather.model_validate_json(call.arguments)

    events = list(client.responses.create(**RESPONSE, stream=True))
    assert [item.type for item in events[-1].response.output] == [item.type for item in asked.output]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == "".join(call.arguments for call in calls)
    assert len(pieces) > len(calls)

    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    turn = {**RESPONSE, "input": results, "previous_response_id": asked.id, "max_output_tokens": 16}
    free = client.responses.create(**{**turn, "tool_choice": "auto"})
    assert free.usage.input_tokens > asked.usage.input_tokens
    told = client.responses.create(**{**turn, "tool_choice": "none"})
    assert told.output_text


def test_the_arguments_of_a_call_in_a_response_are_parsed(client):
    asked = {**RESPONSE, "tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}
    [call, *_] = client.responses.parse(**asked).output
    assert isinstance(call.parsed_arguments, Weather)
    with client.responses.stream(**asked) as stream:
        [streamed, *_] = stream.until_done().get_final_response().output
    assert streamed.parsed_arguments == call.parsed_arguments
    assert json.loads(streamed.arguments) == call.parsed_arguments.model_dump()
