"""What is HTTP's and not OpenAI's: encodings, pages of other origins, connections, the end of a gateway."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.http_client import COMPRESS, send
from tests.stack import Stack, fake_model

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PAGE = "https://chat.example.com"


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    document: dict[str, Any] = {
        "models": [fake_model()],
        "gateway": {"cors_allow_origins": [PAGE], "unknown_fields": "ignore"},
    }
    with Stack(redis_url, document) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


@pytest.mark.parametrize("encoding", [*COMPRESS, "identity"])
def test_a_body_may_be_compressed(stack: Stack, key: str, encoding: str) -> None:
    body = COMPRESS.get(encoding, bytes)(json.dumps(CHAT).encode())
    headers = {"Content-Encoding": encoding}
    answer = send(stack.url, "POST", "/v1/chat/completions", body, key=key, headers=headers)
    assert answer.json["usage"]["completion_tokens"] == 1


def test_unknown_fields_are_told_where_they_are_not_refused(stack: Stack, key: str) -> None:
    body = {**CHAT, "new_field": 1, "messages": [{"role": "user", "content": "hi", "mood": "good"}]}
    for stream in (False, True):
        answer = send(stack.url, "POST", "/v1/chat/completions", {**body, "stream": stream}, key=key)
        assert answer.status == 200
        assert answer.headers["x-headrace-ignored"] == "messages[0].mood, new_field"
    known = send(stack.url, "POST", "/v1/chat/completions", CHAT, key=key)
    assert "x-headrace-ignored" not in known.headers


def test_a_page_of_a_configured_origin_may_ask_and_read(stack: Stack, key: str) -> None:
    question = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    may = send(stack.url, "OPTIONS", "/v1/chat/completions", headers=question)  # browsers send no key here
    assert may.status == 204
    assert may.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-os" in may.headers["access-control-allow-headers"]
    for fields in ({}, {"stream": True}, {"model": "unknown"}):
        answer = send(
            stack.url, "POST", "/v1/chat/completions", {**CHAT, **fields}, key=key, headers={"Origin": PAGE}
        )
        assert answer.headers["access-control-allow-origin"] == PAGE, fields
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://elsewhere.example.com", "null", PAGE + ".elsewhere.com"])
def test_other_pages_may_not(stack: Stack, key: str, origin: str) -> None:
    answer = send(stack.url, "GET", "/v1/models", key=key, headers={"Origin": origin})
    assert "access-control-allow-origin" not in answer.headers


def test_without_configured_origins_nothing_is_said_of_them(redis_url: str) -> None:
    with Stack(redis_url) as stack:
        question = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        asked = send(stack.url, "OPTIONS", "/v1/chat/completions", headers=question)
        assert (asked.status, asked.error["code"]) == (405, "method_not_allowed")
        answer = send(stack.url, "GET", "/v1/models", key=stack.key(), headers={"Origin": PAGE})
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_gateway_that_drains_closes_its_connections(redis_url: str) -> None:
    document: dict[str, Any] = {"models": [fake_model("slow", "step_delay_ms=100")]}
    with Stack(redis_url, document) as stack:
        key = stack.key()
        idle = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=10)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        idle.request("GET", "/v1/models", headers=headers)
        first = idle.getresponse()
        first.read()
        assert first.getheader("Connection") != "close"
        busy = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=10)
        body = json.dumps({**CHAT, "model": "slow", "max_tokens": 20, "stream": True})
        busy.request("POST", "/v1/chat/completions", body, headers)
        stream = busy.getresponse()
        stack.kill("gateway", signal.SIGTERM)
        while True:  # until it has noticed
            idle.request("GET", "/v1/models", headers=headers)
            answer = idle.getresponse()
            answer.read()
            if answer.getheader("Connection") == "close":
                break
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert stack.processes["gateway"].wait(10) == 0
