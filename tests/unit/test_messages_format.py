"""A message in Anthropic's form: events in the order that clients rely on, which add up to the whole."""

import json

import pytest
from anthropic import types
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.anthropic.dialect import ANTHROPIC, speaks_anthropic
from gateway.anthropic.message_format import MessageFormat
from gateway.errors import (
    ApiError,
    internal_error,
    invalid_api_key,
    invalid_request,
    model_not_found,
    overloaded,
    permission_denied,
    rate_limited,
    timed_out,
    too_large,
    unavailable,
    upstream_error,
)
from gateway.generation import Usage
from gateway.openai.answer import AnswerIdentity
from gateway.text_delta import TextDelta, ToolCallDelta

USAGE = Usage(prompt_tokens=20, completion_tokens=7, cached_tokens=16)
EVENT = TypeAdapter(types.RawMessageStreamEvent)


def delta(text="", *, reasoning="", calls=(), end=None, stop=None):
    return TextDelta(0, text, end, reasoning=reasoning, tool_calls=tuple(calls), stop_reason=stop)


def call(index, arguments="", name=None):
    return ToolCallDelta(index, arguments, None if name is None else f"call_{index}", name)


def new_format(**options):
    return MessageFormat(AnswerIdentity("msg_1", "m"), **options)


def events_of(stream: bytes):
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def streamed(*deltas, **options):
    """The events of a complete stream."""
    form = new_format(**options)
    stream = form.opening_events(Usage(20, 1, 16))
    for one in deltas:
        stream += form.events([one])
    return events_of(stream + form.closing_events(USAGE))


def whole(*deltas, **options):
    form = new_format(**options)
    form.take(deltas)
    return json.loads(json.dumps(form.whole([], USAGE)))


def added_up(events):
    """What the official client makes of them."""
    snapshot = None
    buffers = {}
    for event in events:
        snapshot = accumulate_event(
            event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
        )
    return snapshot.to_dict()


def test_a_text_is_one_block_with_a_delta_for_each_update():
    events = streamed(delta("Hel"), delta("lo"), delta(end="stop"))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start["usage"]["input_tokens"] == 4
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert [event["delta"] for event in events[2:4]] == [
        {"type": "text_delta", "text": "Hel"},
        {"type": "text_delta", "text": "lo"},
    ]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None}


def test_what_came_from_the_cache_is_counted_apart():
    assert whole(delta("x", end="stop"))["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 7,
    }


def test_thought_text_and_calls_are_blocks_in_the_order_in_which_they_came():
    deltas = [
        delta(reasoning="Hm"),
        delta("Let me see.", reasoning="."),
        delta(calls=[call(0, name="weather"), call(0, '{"city":')]),
        delta(calls=[call(0, '"Ulm"}'), call(1, "{}", name="time")]),
        delta("And so on.", end="stop"),
    ]
    message = whole(*deltas)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Ulm"}},
        {"type": "tool_use", "id": "call_1", "name": "time", "input": {}},
        {"type": "text", "text": "And so on."},
    ]
    assert message["stop_reason"] == "tool_use"
    assert added_up(streamed(*deltas)) == message


def test_thoughts_may_be_left_out():
    deltas = [delta(reasoning="secret"), delta("x", end="stop")]
    events = streamed(*deltas, shows_thinking=False)
    assert "secret" not in json.dumps(events)
    assert whole(*deltas, shows_thinking=False)["content"][0]["thinking"] == ""
    assert added_up(events) == whole(*deltas, shows_thinking=False)


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (delta("x", end="stop"), "end_turn", None),
        (delta("x", end="length"), "max_tokens", None),
        (delta("x", end="stop", stop="END"), "stop_sequence", "END"),
        (delta("x", end="stop", stop=17), "end_turn", None),
        (delta(calls=[call(0, "{}", name="a")], end="stop"), "tool_use", None),
        (delta(calls=[call(0, "{", name="a")], end="length"), "max_tokens", None),
    ],
)
def test_why_it_stopped(last, reason, sequence):
    message = whole(last)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert added_up(streamed(last)) == message


def test_a_call_that_was_cut_has_what_there_is_of_its_input():
    cut = delta(calls=[call(0, '{"city": "Ulm", "days": [1, 2', name="a")], end="length")
    assert whole(cut)["content"][0]["input"] == {"city": "Ulm", "days": [1, 2]}
    assert added_up(streamed(cut)) == whole(cut)


def test_an_answer_without_a_word_has_no_blocks():
    assert whole(delta(end="stop"))["content"] == []
    assert [event["type"] for event in streamed(delta(end="stop"))] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


def test_a_stream_that_breaks_off_has_an_error_and_no_end():
    form = new_format()
    stream = form.opening_events(USAGE) + form.events([delta("Hel")])
    events = events_of(stream + form.failure_events(upstream_error("The engine died.")))
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "The engine died."}}
    assert "message_stop" not in {event["type"] for event in events}


odd_text = st.text(max_size=6) | st.sampled_from(["\n\n", "event: error\n", "data: [DONE]\n\n", "\r", "\x00"])
values = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.none(), max_size=3)


@st.composite
def answers(draw):
    """Deltas of any answer: texts, thoughts and calls in any order, each cut into pieces anywhere."""
    deltas, num_calls = [], 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind == "call":
            arguments = json.dumps(draw(values), ensure_ascii=draw(st.booleans()))
            cut = draw(st.integers(0, len(arguments)))
            deltas.append(delta(calls=[call(num_calls, arguments[:cut], name="a")]))
            deltas.append(delta(calls=[call(num_calls, arguments[cut:])]))
            num_calls += 1
        elif kind == "text":
            deltas.append(delta(draw(odd_text)))
        else:
            deltas.append(delta(reasoning=draw(odd_text)))
    end = draw(st.sampled_from(["stop", "length"]))
    return [*deltas, delta(draw(odd_text), end=end, stop=draw(st.none() | st.text(min_size=1, max_size=3)))]


@given(answers())
def test_a_stream_adds_up_to_the_whole_and_its_blocks_never_overlap(deltas):
    events = streamed(*deltas)
    assert added_up(events) == whole(*deltas)
    open_block, num_blocks = None, 0
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == num_blocks
            open_block, num_blocks = num_blocks, num_blocks + 1
        else:
            assert event["index"] == open_block
            if event["type"] == "content_block_stop":
                open_block = None
    assert open_block is None


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (invalid_request("No.", "max_tokens"), 400, "invalid_request_error"),
        (invalid_api_key("No."), 401, "authentication_error"),
        (permission_denied("No."), 403, "permission_error"),
        (model_not_found("m"), 404, "not_found_error"),
        (ApiError(405, "No.", kind="invalid_request_error"), 405, "invalid_request_error"),
        (too_large(1), 413, "request_too_large"),
        (rate_limited("No.", 1.0), 429, "rate_limit_error"),
        (overloaded("No."), 529, "overloaded_error"),
        (internal_error(), 500, "api_error"),
        (upstream_error("No."), 502, "api_error"),
        (unavailable("No."), 503, "overloaded_error"),
        (timed_out("No."), 504, "timeout_error"),
    ],
)
def test_errors_have_the_type_of_their_status(error, status, kind):
    assert ANTHROPIC.status_of(error) == status
    body = ANTHROPIC.body_of(error, "req-1")
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, "req-1")
    assert error.param is None or error.param in body["error"]["message"]


def test_the_dialect_goes_by_the_path():
    for path in ("/v1/messages", "/v1/messages/", "/v1/messages/batches"):
        assert speaks_anthropic(path, {})
    for path in ("/v1/messagesx", "/v1/models", "/v1/models/m", "/", "/v1/chat/completions"):
        assert not speaks_anthropic(path, {})


def test_models_are_told_in_this_shape_to_its_own_clients():
    version = {"anthropic-version": "2023-06-01"}
    assert speaks_anthropic("/v1/models", version)
    assert speaks_anthropic("/v1/models/org/m", version)
    assert not speaks_anthropic("/v1/chat/completions", version)
