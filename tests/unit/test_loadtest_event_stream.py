"""Server-sent events, cut at any byte."""

from __future__ import annotations

import pytest

from loadtest.event_stream import EventStream

STREAM = (
    'data: {"a": "ü"}\n\n: ping\n\nevent: x\r\ndata:one\r\ndata: two\r\n\r\nid: 5\n\ndata: [DONE]\n\n'
).encode()
EVENTS = ['{"a": "ü"}'.encode(), b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_arrive(size: int) -> None:
    stream = EventStream()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in stream.feed(piece)] == EVENTS


def test_unfinished_event_is_not_given_out() -> None:
    stream = EventStream()
    assert stream.feed(b"data: half") == []
    assert stream.feed(b"\n") == []
    assert stream.feed(b"\n") == [b"half"]
