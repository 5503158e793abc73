"""/v1/embeddings, from the official client to real engine processes and back."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch

from engine_service.fake_embedder import FakeEmbedder
from engine_service.loaders.huggingface_text import read_text_bundle
from shared.tokenizer import Tokenizer
from tests.http_client import Answer, send
from tests.models import write_tiny_bert
from tests.stack import ADMIN_TOKEN, Stack, fake_model, wait_until

DIM = 8
FAKE = FakeEmbedder(DIM)
MAX_LEN = 100
IDLE = {"in flight": 0, "running": 0, "waiting": 0, "blocks held": 0}


def fake_embedder(name: str = "fake-embedder", options: str = "", **fields: Any) -> dict[str, Any]:
    return fake_model(name, options, runner="pooling", **({"max_model_len": MAX_LEN} | fields))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("bert")
    return path, write_tiny_bert(path)


@pytest.fixture(scope="module")
def stack(redis_url: str, tiny: tuple[Path, Any]) -> Iterator[Stack]:
    document = {
        "models": [
            fake_embedder(),
            fake_embedder("short-embedder", is_matryoshka=True),
            {"name": "tiny", "source": str(tiny[0]), "runner": "pooling", "num_threads": 1},
            fake_model("writer"),
        ],
        "tenants": [
            {"name": "all"},
            {"name": "narrow", "models": ["fake-embedder"]},
            {"name": "rare", "requests_per_minute": 1},
        ],
        "routes": [{"name": "vectors", "split": [{"variant": "v", "model": "fake-embedder"}]}],
    }
    with Stack(redis_url, document) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


@pytest.fixture(scope="module")
def client(stack: Stack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=key, max_retries=0)


def post(stack: Stack, key: str, **fields: Any) -> Answer:
    return send(stack.url, "POST", "/v1/embeddings", {"model": "fake-embedder", **fields}, key=key)


# ---------------------------------------------------------------------- what is answered


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_the_official_client_gets_the_vectors_in_the_order_of_its_texts(client, encoding):
    answer = client.embeddings.create(model="fake-embedder", input=["water", "falls", "water"], **encoding)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert {entry.object for entry in answer.data} == {"embedding"}
    for entry, text in zip(answer.data, ("water", "falls", "water"), strict=True):
        given = entry.embedding
        # The client decodes only what it has asked for by itself.
        assert isinstance(given, str) == (encoding.get("encoding_format") == "base64")
        if isinstance(given, str):
            given = np.frombuffer(base64.b64decode(given), dtype="<f4")
        np.testing.assert_array_equal(np.array(given, dtype=np.float32), FAKE.vector(text.encode()))
    assert (answer.object, answer.model) == ("list", "fake-embedder")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (15, 15)


@pytest.mark.parametrize("form", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_an_input_has_the_same_vector_in_every_form(client, form):
    [entry] = client.embeddings.create(model="fake-embedder", input=form).data
    np.testing.assert_array_equal(np.array(entry.embedding, dtype=np.float32), FAKE.vector(b"hi"))


def test_a_route_leads_to_an_embedding_model_and_the_headers_say_where(stack, key):
    answer = post(stack, key, model="vectors", input="hi", user="me")
    assert answer.status == 200
    assert answer.json["model"] == "vectors"
    assert answer.headers["x-headrace-engine"] == "fake-embedder-0"
    assert answer.headers["x-headrace-variant"] == "v"
    assert answer.headers["x-headrace-route-reason"] == "only"


def test_a_request_of_many_texts_is_answered_whole_and_in_order(stack, key):
    texts = [f"text {number}" for number in range(2048)]
    answer = post(stack, key, input=texts, encoding_format="float")
    assert answer.status == 200
    got = np.array([entry["embedding"] for entry in answer.json["data"]], dtype=np.float32)
    np.testing.assert_array_equal(got, np.stack([FAKE.vector(text.encode()) for text in texts]))


def test_dimensions_cut_the_vectors_of_a_model_that_was_trained_for_it(stack, client):
    whole = client.embeddings.create(model="short-embedder", input="hi").data[0].embedding
    short = client.embeddings.create(model="short-embedder", input="hi", dimensions=3).data[0].embedding
    np.testing.assert_allclose(short, np.array(whole[:3]) / np.linalg.norm(whole[:3]), rtol=1e-6)
    assert len(client.embeddings.create(model="fake-embedder", input="hi", dimensions=DIM).data) == 1


@torch.inference_mode()
def test_a_real_model_gives_what_transformers_gives(client, tiny):
    path, model = tiny
    texts = ["water falls to the turbine", "fox", "the quick brown fox jumps over the lazy dog " * 2]
    answer = client.embeddings.create(model="tiny", input=texts)
    tokenizer = Tokenizer(read_text_bundle(path, json.loads((path / "config.json").read_text())))
    lists = tokenizer.encode_whole(texts)
    assert all((tokens[0], tokens[-1]) == (1, 2) for tokens in lists)
    for entry, tokens in zip(answer.data, lists, strict=True):
        mean = model(torch.tensor([tokens])).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=-1)
        torch.testing.assert_close(torch.tensor(entry.embedding), expected, atol=1e-5, rtol=1e-4)
    assert answer.usage.prompt_tokens == sum(map(len, lists))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": ["a", "b" * (MAX_LEN + 1)]}, "input[1]", "context_length_exceeded"),
        ({"input": "b" * 1_000_000}, "input", "context_length_exceeded"),
        ({"input": [[1], [1] * (MAX_LEN + 1)]}, "input[1]", "context_length_exceeded"),
        ({"input": [[1], [261]]}, "input[1]", "invalid_value"),
        ({"input": "a", "dimensions": DIM + 1}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 2}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "max_tokens": 1}, "max_tokens", "unknown_parameter"),
        ({"input": "a", "model": "writer"}, "model", "unsupported_model"),
    ],
)
def test_what_cannot_be_embedded_is_400_and_named(stack, key, fields, param, code):
    answer = post(stack, key, **fields)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
def test_an_embedding_model_does_not_write(stack, key, path, fields):
    answer = send(stack.url, "POST", path, {"model": "fake-embedder", **fields}, key=key)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "/v1/embeddings" in answer.error["message"]


def test_keys_tenants_and_limits_hold_as_for_the_other_endpoints(stack, key):
    assert post(stack, "hr-wrong", input="a").status == 401
    assert post(stack, key, model="nobody", input="a").status == 404
    narrow = stack.key("narrow")
    assert post(stack, narrow, input="a").status == 200
    assert post(stack, narrow, model="vectors", input="a").status == 403
    rare = stack.key("rare")
    first, second = (post(stack, rare, input="a") for _ in range(2))
    assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert (second.status, second.error["code"]) == (429, "rate_limit_exceeded")


def test_the_list_of_models_says_which_make_embeddings(client):
    runners = {model.id: model.runner for model in client.models.list()}
    assert runners == {
        "fake-embedder": "pooling",
        "short-embedder": "pooling",
        "tiny": "pooling",
        "vectors": "pooling",
        "writer": "generate",
    }


def test_what_was_answered_is_counted(stack, key):
    def figures() -> dict[str, float]:
        lines = stack.get("/metrics")[1].decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def count(name: str) -> float:
        return figures().get(name, 0.0)

    labels = 'engine="fake-embedder-0"', 'model_name="fake-embedder"'
    success = f'vllm:request_success_total{{{labels[0]},finished_reason="stop",{labels[1]}}}'
    http = 'headrace_http_requests_total{method="POST",route="/v1/embeddings",status="200"}'
    tokens = f"vllm:prompt_tokens_total{{{','.join(labels)}}}"
    before = {name: count(name) for name in (success, http, tokens)}
    assert post(stack, key, input=["abc", "de"]).status == 200
    assert [count(name) - before[name] for name in (success, http)] == [1, 1]
    assert count(tokens) - before[tokens] == 5
    assert not any(name.startswith("vllm:time_to_first") and "embedder" in name for name in figures())


def test_the_prefix_caches_are_reset_and_embedding_engines_have_none(stack, key):
    def cached() -> int:
        body = {"model": "writer", "prompt": "again and " * 10, "max_tokens": 1}
        answer = send(stack.url, "POST", "/v1/completions", body, key=key)
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    def reset(body: dict[str, Any] | None, token: str = ADMIN_TOKEN) -> Answer:
        return send(stack.url, "POST", "/admin/prefix-cache/reset", body, key=token)

    for body in (None, {}, {"model": "writer"}):
        cached()
        assert cached() > 0
        answer = reset(body)
        assert (answer.status, answer.json) == (200, {"engines_told": 1})
        assert cached() == 0  # the reset comes before the request on the same connection
    assert reset(None, "wrong").status == 401
    assert reset({"model": "nobody"}).status == 404
    assert reset({"model": "tiny"}).error["param"] == "model"
    assert reset({"modle": "writer"}).error["code"] == "unknown_parameter"


# ---------------------------------------------------------------------- departures


@pytest.fixture
def slow(redis_url: str) -> Iterator[Stack]:
    """Three engines whose passes take long, one text each."""
    model = fake_embedder(options="step_delay_ms=100", engines=3, max_num_seqs=1)
    tenant = {"name": "t", "max_concurrency": 1000}
    with Stack(redis_url, {"models": [model], "tenants": [tenant]}) as stack:
        yield stack


def states(stack: Stack) -> dict[str, str]:
    return {engine["engine_id"]: engine["state"] for engine in stack.admin_status()["engines"]}


def engine_at_work(stack: Stack) -> str | None:
    """The one that computes, if one does."""
    at_work = [engine["engine_id"] for engine in stack.admin_status()["engines"] if engine["in_flight"]]
    return at_work[0] if at_work else None


async def answer_of(session: aiohttp.ClientSession, url: str, num_texts: int) -> tuple[int, dict[str, Any]]:
    body = {"model": "fake-embedder", "input": ["a"] * num_texts}
    async with session.post(url + "/v1/embeddings", json=body) as response:
        return response.status, await response.json()


async def test_departures_of_clients_and_engines(slow):
    """In turn, on one stack: a client leaves, an engine drains, one is killed, the last one is killed."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {slow.key()}"}) as session:

        async def start(num_texts: int) -> tuple[asyncio.Task[tuple[int, dict[str, Any]]], str]:
            task = asyncio.create_task(answer_of(session, slow.url, num_texts))
            return task, await asyncio.to_thread(wait_until, lambda: engine_at_work(slow), 5, "a request")

        leaves, _ = await start(500)
        leaves.cancel()
        await asyncio.to_thread(wait_until, lambda: slow.gauges() == IDLE, 5, "an idle stack")
        slots = slow.keys.concurrency_slots("t")
        await asyncio.to_thread(wait_until, lambda: slow.redis.zcard(slots) == 0, 5, "the slot's release")

        handed_over, engine = await start(8)
        slow.kill(engine, signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: states(slow).get(engine) == "draining", 5, "its farewell")
        slow.kill(engine, signal.SIGTERM)  # the second signal: not a pass more
        status, document = await handed_over
        assert (status, len(document["data"])) == (200, 8)
        assert await asyncio.to_thread(slow.processes[engine].wait, 10) == 0

        moved, engine = await start(8)
        slow.kill(engine)
        status, document = await moved
        assert (status, len(document["data"])) == (200, 8)

        # The one that is left has no other to hand over to.
        lost, engine = await start(100)
        slow.kill(engine)
        status, document = await lost
        assert (status, document["error"]["code"]) == (502, "upstream_error")
        status, document = await answer_of(session, slow.url, 1)
        assert (status, document["error"]["code"]) == (503, "unavailable")
