"""The events of a response: their order, and that they add up to the response."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.errors import upstream_error
from gateway.generation import Usage
from gateway.openai.answer import AnswerIdentity
from gateway.openai.responses.body import ResponsesBody
from gateway.openai.responses.identity import fresh_response_id
from gateway.openai.responses.response_format import ResponseFormat
from gateway.openai.schema import check_body
from gateway.scored_token import ScoredToken
from gateway.text_delta import TextDelta, ToolCallDelta

USAGE = Usage(prompt_tokens=10, completion_tokens=6, cached_tokens=4)
ANY_EVENT = TypeAdapter(ResponseStreamEvent)
IDENTITY = AnswerIdentity(fresh_response_id(), "m", created=1)


def make_format(**fields) -> ResponseFormat:
    body = check_body(ResponsesBody, {"model": "m", "input": "hi", **fields})
    return ResponseFormat(body, IDENTITY, 1)


def said(text, finish_reason=None, **fields):
    return TextDelta(0, text, finish_reason, num_tokens=1, **fields)


def read(stream: bytes) -> list[dict]:
    """The events, each checked against the official client's types."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        ANY_EVENT.validate_python(document)
        events.append(document)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def stream(deltas, answer=None, **fields) -> list[dict]:
    answer = answer or make_format(**fields)
    return read(b"".join(answer.events([delta]) for delta in deltas) + answer.closing_events(USAGE))


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


MESSAGE_BEGINS = ["output_item.added", "content_part.added"]
MESSAGE_ENDS = ["output_text.done", "content_part.done", "output_item.done"]
CALL = ToolCallDelta(0, "", "call_a", "f")
TURN = [
    said("", reasoning="let me "),
    said("", reasoning="think"),
    said("Well, "),
    said("I look.\n"),
    said("", tool_calls=(CALL,)),
    said("", tool_calls=(ToolCallDelta(0, '{"a":'),)),
    said("", tool_calls=(ToolCallDelta(0, "1}"),)),
    said("", tool_calls=(ToolCallDelta(1, "{}", "call_b", "g"),)),
    said("", "stop"),
]


def test_the_events_of_a_text_come_in_openais_order():
    events = stream([said("Hel"), said("lo \u00fc"), said("", None), said("!", "stop")])
    assert kinds(events) == [
        "created", "in_progress", *MESSAGE_BEGINS,
        "output_text.delta", "output_text.delta", "output_text.delta",
        *MESSAGE_ENDS, "completed",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert deltas == ["Hel", "lo \u00fc", "!"]
    assert events[-4]["text"] == "Hello \u00fc!"
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert Response.model_validate(events[-1]["response"]).output_text == "Hello \u00fc!"


def test_thoughts_text_and_calls_are_items_of_their_own():
    events = stream(TURN)
    assert kinds(events) == [
        "created", "in_progress",
        *MESSAGE_BEGINS, "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        *MESSAGE_BEGINS, "output_text.delta", "output_text.delta", *MESSAGE_ENDS,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [(item["call_id"], item["arguments"]) for item in output[2:]] == [
        ("call_a", '{"a":1}'),
        ("call_b", "{}"),
    ]
    assert len({item["id"] for item in output}) == 4
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert done == output
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert {item["status"] for item in added} == {"in_progress"}
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_a_whole_response_is_the_one_that_the_last_event_tells():
    whole = make_format()
    whole.take(TURN)
    told, streamed = whole.whole((), USAGE), stream(TURN)[-1]["response"]
    assert told["completed_at"] >= streamed["completed_at"]
    assert told | {"completed_at": 0} == streamed | {"completed_at": 0}
    Response.model_validate(told)


def test_text_behind_a_call_is_a_message_of_its_own():
    called = said("", tool_calls=(ToolCallDelta(0, "{}", "call_a", "f"),))
    events = stream([said("a"), said("b"), called, said("c"), said("d"), said("", "stop")])
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    for index, text in ((0, "ab"), (2, "cd")):
        deltas = [event for event in events if event["type"].endswith("text.delta")]
        deltas = [event for event in deltas if event["output_index"] == index]
        assert "".join(event["delta"] for event in deltas) == text == output[index]["content"][0]["text"]
        assert {event["item_id"] for event in deltas} == {output[index]["id"]}


@pytest.mark.parametrize("by_pieces", [True, False])
def test_an_answer_that_is_cut_says_so_in_its_item_too(by_pieces):
    deltas = [said("Hel"), said("lo", "length")] if by_pieces else [said("Hello", "length")]
    last = stream(deltas)[-1]
    assert last["type"] == "response.incomplete"
    response = last["response"]
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_empty_answer_has_an_empty_message():
    response = stream([said("", "stop")])[-1]["response"]
    assert [part["text"] for part in response["output"][0]["content"]] == [""]


def test_usage_is_in_this_apis_form():
    assert stream([said("a", "stop")])[-1]["response"]["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }


@pytest.mark.parametrize("num_deltas", [0, 1, 2])
def test_a_failure_is_an_error_and_a_failed_response(num_deltas):
    answer = make_format()
    begun = answer.events([said("Hel"), said("lo")][:num_deltas]) if num_deltas else b""
    events = read(begun + answer.failure_events(upstream_error("it broke")))
    assert kinds(events)[:2] == ["created", "in_progress"]
    assert kinds(events)[-2:] == ["error", "failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("upstream_error", "it broke")
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert [item["status"] for item in response["output"]] == ["incomplete"] * (num_deltas > 0)


def test_log_probabilities_are_those_of_the_text_and_of_nothing_else():
    def scored(text):
        return [ScoredToken(text, -0.5, [(text, -0.5)], 0)]

    deltas = [
        said("", reasoning="hm", logprobs=scored("hm")),
        said("", logprobs=scored("A")),  # held back
        said("AB", logprobs=scored("B")),
        said("", "stop", logprobs=scored("<end>")),
    ]
    events = stream(deltas, include=["message.output_text.logprobs"], top_logprobs=1)
    [part] = events[-1]["response"]["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["A", "B", "<end>"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


def test_text_that_looks_like_an_event_stays_text():
    text = "\n\ndata: [DONE]\n\nevent: x\r\n"
    events = stream([said("a"), said(text), said("", "stop")])
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a" + text
