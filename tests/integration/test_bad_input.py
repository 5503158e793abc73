"""Whatever a client sends: a clear refusal in OpenAI's shape, and an engine that never hears of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.http_client import COMPRESS, Answer, send
from tests.stack import Stack, fake_model

MAX_BODY = 64 * 1024
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    document = {
        "gateway": {"max_body_bytes": MAX_BODY, "body_timeout_s": 2},
        "models": [fake_model(max_model_len=512)],
        "tenants": [{"name": "all"}, {"name": "narrow", "models": ["other"]}],
        "routes": [{"name": "other", "split": [{"variant": "v", "model": "fake"}]}],
    }
    with Stack(redis_url, document) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


@pytest.fixture(autouse=True)
def _the_engine_never_sees_it(stack: Stack, key: str) -> Iterator[None]:
    before = engine_figures(stack)
    yield
    assert engine_figures(stack) == before
    assert stack.processes["fake-0"].poll() is None
    assert stack.processes["gateway"].poll() is None
    assert "Traceback" not in stack.log("gateway")


def engine_figures(stack: Stack) -> list[int]:
    load = stack.admin_status()["engines"][0]["load"]
    return [load["prompt_tokens"], load["generation_tokens"]]


def chat(stack: Stack, key: str, body: bytes | dict | list, **options) -> Answer:
    return send(stack.url, "POST", "/v1/chat/completions", body, key=key, **options)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": "fa', b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"[" * 10_000, b'{"a": NaN}',
     b'{"model": "fake", "messages": [], "temperature": 1e400}', b"\xef\xbb\xbf{}"],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_what_is_not_a_json_object_is_400(stack, key, body):
    answer = chat(stack, key, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"stream": "yes"}, "stream"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": -(2**63)}, "max_tokens"),
        ({"top_k": 2**31}, "top_k"),
        ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"500": 1}}, "logit_bias"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ],
)
def test_a_wrong_field_is_400_and_named(stack, key, fields, param):
    answer = chat(stack, key, {"model": "fake", "messages": [USER], **fields})
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model": "fake", "messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        ('{"model": "\\udfff", "messages": []}', "model"),
        ('{"model": "fake", "user": "a\\ud800b", "messages": []}', "user"),
        ('{"model": "fake", "messages": [{"role": "\\ud800"}]}', "messages[0].role"),
        ('{"model": "fake", "temperature": 1e400}', "temperature"),
        ('{"model": "fake", "max_tokens": ' + "9" * 5000 + "}", "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_text_and_numbers_that_cannot_be_are_400_and_named(stack, key, body, param):
    answer = chat(stack, key, body.encode())
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_length_that_is_too_large_is_refused_before_the_body_comes(stack, key):
    host = urlsplit(stack.url)
    with socket.create_connection((host.hostname, host.port), 5) as connection:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: 1000000000\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_408(stack, key):
    host = urlsplit(stack.url)
    with socket.create_connection((host.hostname, host.port), 10) as connection:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: 100\r\n\r\n{{"
        )
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 408")


def test_an_unknown_model_is_404_and_a_forbidden_one_403(stack, key):
    unknown = chat(stack, key, {"model": "no/such model", "messages": [USER]})
    assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    forbidden = chat(stack, stack.key("narrow"), {"model": "fake", "messages": [USER]})
    assert (forbidden.status, forbidden.error["code"]) == (403, "permission_denied")


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer "}, {"Authorization": "Basic abc"}, {"Authorization": "Bearer hr-wrong"},
     {"Authorization": "Bearer " + "x" * 4000}, {"x-api-key": "no"}],
)  # fmt: skip
def test_a_missing_or_wrong_key_is_401(stack, headers):
    answer = send(
        stack.url, "POST", "/v1/chat/completions", {"model": "fake", "messages": [USER]}, headers=headers
    )
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


def test_a_revoked_key_stops_working_within_its_cache_time(stack):
    from shared.api_keys import ApiKeyStore
    from tests.stack import PEPPER, wait_until

    secret = stack.key()
    store = ApiKeyStore(stack.redis, stack.keys, PEPPER.encode())
    assert send(stack.url, "GET", "/v1/models", key=secret).status == 200
    record = store.of_secret(secret)
    assert record is not None
    store.revoke(record.key_id)
    wait_until(lambda: send(stack.url, "GET", "/v1/models", key=secret).status == 401, 6, "revocation")


def test_bodies_up_to_the_limit_are_read_and_larger_ones_are_413(stack, key):
    def padded(size: int) -> bytes:
        body = b'{"model": "fake", "messages": 1, "x": "'
        return body + b"y" * (size - len(body) - 2) + b'"}'

    assert chat(stack, key, padded(MAX_BODY - 1)).status == 400  # read, and refused for what it says
    over = chat(stack, key, padded(MAX_BODY + 1))
    assert (over.status, over.error["code"]) == (413, "request_too_large")
    for encoding, compress in COMPRESS.items():
        bomb = compress(padded(20 * MAX_BODY))
        refused = chat(stack, key, bomb, headers={"Content-Encoding": encoding})
        assert (refused.status, refused.error["code"]) == (413, "request_too_large"), encoding


@pytest.mark.parametrize("encoding", sorted(COMPRESS))
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_compressed_body_that_is_cut_or_none_is_refused(stack, key, encoding, is_cut):
    text = b'{"model": "fake", "messages": 1}'
    body = COMPRESS[encoding](text)[:-9] if is_cut else text
    refused = chat(stack, key, body, headers={"Content-Encoding": encoding})
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert encoding in refused.error["message"]


@pytest.mark.parametrize("encoding", ["compress", "gzip, br", "x"])
def test_an_unknown_content_encoding_is_named(stack, key, encoding):
    refused = chat(stack, key, b"{}", headers={"Content-Encoding": encoding})
    assert (refused.status, refused.error["code"]) == (415, "unsupported_media_type")
    assert encoding in refused.error["message"]


def test_a_chunked_body_has_the_same_limit(stack, key):
    host = urlsplit(stack.url)
    with socket.create_connection((host.hostname, host.port), 10) as connection:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode())
        chunk = b"4000\r\n" + b"z" * 0x4000 + b"\r\n"
        for _ in range(6):
            connection.sendall(chunk)
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_unknown_urls_and_methods_answer_in_the_same_shape(stack, key):
    unknown = send(stack.url, "GET", "/v1/nothing", key=key)
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    method = send(stack.url, "GET", "/v1/chat/completions", key=key)
    assert (method.status, method.error["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"
    content_type = chat(stack, key, b"a=b", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert content_type.status == 415
    encoding = chat(stack, key, b"xyz", headers={"Content-Encoding": "gzip"})
    assert encoding.status == 400


def test_a_request_id_is_echoed_if_it_is_fit_to_be(stack, key):
    def echoed(given: str) -> str:
        return send(stack.url, "GET", "/v1/models", key=key, headers={"x-request-id": given}).headers[
            "x-request-id"
        ]

    assert echoed("my-id.1") == "my-id.1"
    assert echoed("x" * 500).startswith("req-")
    assert echoed("a b").startswith("req-")


def test_scanners_make_no_new_time_series(stack, key):
    before = len(stack.get("/metrics")[1])
    for number in range(200):
        send(stack.url, "GET", f"/wp-admin/{number}")
        send(stack.url, f"M{number}", "/v1/models")
    assert len(stack.get("/metrics")[1]) < before + 2000


def test_the_admin_token_is_asked_for(stack, key):
    assert send(stack.url, "GET", "/admin/status").status == 401
    assert send(stack.url, "GET", "/admin/status", key=key).status == 401
