"""What cannot be parsed as HTTP: refused at once, in OpenAI's shape, as the last answer of its connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http_client import Answer, send
from tests.raw_http import talk
from tests.stack import Stack, fake_model

GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SMUGGLED = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, {"models": [fake_model()], "gateway": {"body_timeout_s": 60}}) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


@pytest.fixture(autouse=True)
def _nothing_is_upset(stack: Stack) -> Iterator[None]:
    yield
    assert stack.get("/livez")[0] == 200
    assert "Traceback" not in stack.log("gateway")


def the_only(answers: list[Answer]) -> Answer:
    [answer] = answers
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"].endswith(".")
    assert "\n" not in answer.error["message"]
    return answer


@pytest.mark.parametrize(
    "request_",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"FROB /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"get /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/models HTTP/1.1\nHost: x\n\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        GET + b"Host: y\r\n\r\n",
        b"GET example HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x:99999999/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        GET + b"no colon\r\n\r\n",
        GET + b": no name\r\n\r\n",
        GET + b"X-A: b\r\n folded\r\n\r\n",
        GET + b"X-A: a\rX-B: b\r\n\r\n",
        GET + b"X-A: a\x00b\r\n\r\n",
    ],
    ids=lambda request: repr(request[:40]),
)
def test_what_is_no_http_is_400(stack: Stack, request_: bytes) -> None:
    answer = the_only(talk(stack.url, request_))
    assert (answer.status, answer.error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET /" + b"x" * 4097 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "url_too_long"),
        (GET + b"X-A: " + b"x" * 8191 + b"\r\n\r\n", 431, "headers_too_large"),
        (GET + b"x" * 8191 + b": a\r\n\r\n", 431, "headers_too_large"),
        (GET + b"X-A: a\r\n" * 200 + b"\r\n", 431, "headers_too_large"),
    ],
    ids=["url", "header", "name", "number"],
)
def test_heads_have_bounds(stack: Stack, request_: bytes, status: int, code: str) -> None:
    answer = the_only(talk(stack.url, request_))
    assert (answer.status, answer.error["code"]) == (status, code)


def test_a_head_within_the_bounds_is_read(stack: Stack, key: str) -> None:
    headers = {"X-Long": "x" * 8100, **{f"X-{number}": "a" for number in range(100)}}
    assert send(stack.url, "GET", "/v1/models?" + "x" * 4000, key=key, headers=headers).status == 200


def test_a_refusal_reaches_a_client_that_is_still_sending(stack: Stack) -> None:
    request = GET + b"X-A: " + b"x" * 20_000_000 + b"\r\n\r\n"
    assert the_only(talk(stack.url, request)).status == 431


@pytest.mark.parametrize(
    "headers_and_body",
    [
        b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 2\r\nContent-Length: 60\r\n\r\n{}",
        b"Content-Length: 2, 60\r\n\r\n{}",
        b"Content-Length: +2\r\n\r\n{}",
        b"Content-Length: -1\r\n\r\n{}",
        b"Content-Length: 0x2\r\n\r\n{}",
        b"Content-Length: 1 2\r\n\r\n{}",
        b"Content-Length: \r\n\r\n{}",
        b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        b"Content-Length : 2\r\n\r\n{}",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\n1\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\n2\n{}\r\n0\r\n\r\n",
    ],
    ids=repr,
)
def test_a_request_whose_end_can_be_disputed_is_400_and_hides_no_other(
    stack: Stack, headers_and_body: bytes
) -> None:
    """Proxies in front of us may have seen another end: whatever follows must not be answered."""
    answer = the_only(talk(stack.url, POST + headers_and_body + SMUGGLED))
    assert (answer.status, answer.error["code"]) == (400, "invalid_http")


def test_a_body_that_breaks_its_framing_is_400_at_once(stack: Stack, key: str) -> None:
    """Its handler waits for it by then: the interim answer comes before the handler begins."""
    head = POST + f"Authorization: Bearer {key}\r\n".encode() + CHUNKED + b"Expect: 100-continue\r\n\r\n"
    answer = the_only(talk(stack.url, head, b"2\r\n{}\r\nzz\r\n" + SMUGGLED))
    assert answer.status == 400
    assert "cannot be read as its headers describe it" in answer.error["message"]


def test_what_follows_a_stream_does_not_harm_it(stack: Stack, key: str) -> None:
    body = b'{"model":"fake","messages":[{"role":"user","content":"hi"}],"max_tokens":200,"stream":true}'
    head = POST + f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    stream, refusal = talk(stack.url, head + body, b"nonsense\r\n\r\n")
    assert stream.data.endswith(b"data: [DONE]\n\n")
    assert the_only([refusal]).status == 400


def test_an_expectation_that_nobody_can_meet_is_417(stack: Stack) -> None:
    answer = the_only(talk(stack.url, POST + b"Expect: miracles\r\nContent-Length: 2\r\n\r\n{}"))
    assert (answer.status, answer.error["code"]) == (417, "expectation_failed")


def test_refusals_of_this_kind_are_counted(stack: Stack) -> None:
    series = b'headrace_http_requests_total{method="other",route="other",status="431"} '

    def count() -> float:
        _, exposition = stack.get("/metrics")
        found = exposition.partition(series)[2].split(b"\n", 1)[0]
        return float(found or 0)

    before = count()
    talk(stack.url, GET + b"X-A: " + b"x" * 9000 + b"\r\n\r\n")
    assert count() == before + 1
