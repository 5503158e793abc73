"""What a stream of events looks like on the wire while nothing comes, and where it ends."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.http_client import send
from tests.integration.nonsense_engine import nonsense_engine
from tests.stack import Stack, fake_model

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": True}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    document: dict[str, Any] = {
        "models": [fake_model("slow", "step_delay_ms=250"), fake_model("fast")],
        "gateway": {"stream_keep_alive_s": 0.1},
    }
    with Stack(redis_url, document) as stack:
        yield stack


def lines_of_stream(stack: Stack, **fields: Any) -> list[bytes]:
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=30)
    headers = {"Authorization": f"Bearer {stack.key()}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, **fields}), headers)
    response = connection.getresponse()
    assert response.status == 200
    lines = response.read().split(b"\n\n")
    connection.close()
    return lines


def test_comments_come_while_nothing_else_does_before_the_first_token_too(stack: Stack) -> None:
    lines = lines_of_stream(stack, model="slow")
    assert lines[0] == b": keep-alive"
    comments = [line for line in lines if line.startswith(b":")]
    assert set(comments) == {b": keep-alive"}
    assert len(comments) >= 3
    rest = [line for line in lines if line and not line.startswith(b":")]
    assert all(line.startswith(b"data: ") for line in rest), "a comment stands between events only"
    assert rest[-1] == b"data: [DONE]"


def test_no_comment_comes_where_events_do(stack: Stack) -> None:
    assert not [line for line in lines_of_stream(stack, model="fast") if line.startswith(b":")]


def test_the_delay_of_the_first_event_is_measured_once_for_each_stream(stack: Stack) -> None:
    def count() -> float:
        _, exposition = stack.get("/metrics")
        return float(exposition.partition(b"\nheadrace_first_event_delay_seconds_count ")[2].split(b"\n")[0])

    before = count()
    lines_of_stream(stack, model="fast", max_tokens=20)
    lines_of_stream(stack, model="slow")  # where a comment comes first
    whole = send(
        stack.url, "POST", "/v1/chat/completions", {**CHAT, "model": "fast", "stream": False}, key=stack.key()
    )
    assert whole.status == 200
    assert count() == before + 2


def test_what_fails_behind_a_comment_is_an_event_and_the_end(stack: Stack) -> None:
    """The status has left with the comment."""
    engine = stack.processes["slow-0"]
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=30)
    headers = {"Authorization": f"Bearer {stack.key()}", "Content-Type": "application/json"}
    body = json.dumps({**CHAT, "model": "slow", "max_tokens": 100})
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    assert response.readline() == b": keep-alive\n"
    engine.kill()
    engine.wait()
    rest = response.read()
    assert b"[DONE]" not in rest
    [error] = [json.loads(line[6:]) for line in rest.split(b"\n\n") if b'"error"' in line]
    assert error["error"]["code"] in ("upstream_error", "unavailable")


def test_a_fault_of_ours_ends_a_stream_with_an_event_and_no_second_answer(redis_url: str) -> None:
    with Stack(redis_url, {"models": [fake_model("mad", engines=0)]}) as stack:
        address = f"ipc://{stack.directory}/mad.sock"
        with nonsense_engine(address, redis_url, stack.keys, "mad"):
            stack.wait_linked(1)
            lines = lines_of_stream(stack, model="mad", max_tokens=9)
        log = stack.log("gateway")
    *said, failed, nothing = lines
    assert nothing == b""
    assert all(line.startswith(b'data: {"id":') for line in said)
    assert json.loads(failed.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert "Traceback" in log
