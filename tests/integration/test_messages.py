"""Anthropic's official client, unchanged, against real processes (with models that need no weights)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest

from tests.http_client import send
from tests.stack import Stack, fake_model

USER = [{"role": "user", "content": "tell me something long enough"}]
BODY = {"model": "fake", "messages": USER, "max_tokens": 40, "temperature": 0}
# This client no longer knows sampling parameters, which older ones have and which this API still takes.
ASKED = {"model": "fake", "messages": USER, "max_tokens": 40, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    models = [fake_model(), fake_model("brief", "eos_every=8"), fake_model("mortal", "step_delay_ms=20")]
    tenants = [
        {"name": "t", "models": ["fake", "brief", "mortal"]},
        {"name": "hasty", "models": ["fake"], "requests_per_minute": 1},
    ]
    with Stack(redis_url, {"models": models, "tenants": tenants}) as stack:
        yield stack


def client_of(stack: Stack, key: str | None = None, **options) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.url, api_key=key or stack.key(), max_retries=0, **options)


@pytest.fixture(scope="module")
def client(stack: Stack) -> anthropic.Anthropic:
    return client_of(stack)


def num_input_tokens(usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def same(message) -> dict:
    """What two answers to one question have in common."""
    document = message.to_dict()
    document["usage"] = {"input": num_input_tokens(message.usage), "output": message.usage.output_tokens}
    return {name: value for name, value in document.items() if name != "id"}


def test_the_final_message_of_a_stream_is_the_whole_one(client):
    asked = {**ASKED, "model": "mortal"}  # slow enough for several pieces
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == whole.content[0].text == final.content[0].text
    assert same(final) == same(whole)
    assert (whole.stop_reason, whole.stop_sequence, whole.usage.output_tokens) == ("max_tokens", None, 40)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "mortal")
    assert whole.id.startswith("msg_")


def test_raw_events_come_in_their_order_and_begin_with_the_prompts_usage(client):
    events = list(client.messages.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    counted = client.messages.count_tokens(model="fake", messages=USER).input_tokens
    assert num_input_tokens(events[0].message.usage) == counted
    assert events[-2].usage.output_tokens == 40


async def test_the_asynchronous_client_is_served_alike(stack, client):
    async with (
        anthropic.AsyncAnthropic(base_url=stack.url, api_key=stack.key(), max_retries=0) as other,
        other.messages.stream(**ASKED) as stream,
    ):
        final = await stream.get_final_message()
    assert same(final) == same(client.messages.create(**ASKED))


def test_an_end_of_the_models_own_is_an_end_of_its_turn(client):
    message = client.messages.create(**{**ASKED, "model": "brief", "max_tokens": 500})
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens < 500


def test_the_stop_sequence_that_ended_a_message_is_told(client):
    text = client.messages.create(**ASKED).content[0].text
    sequence = text[20:24]
    begin = text.find(sequence)
    options = {**ASKED, "stop_sequences": ["never said by it", sequence]}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert same(final) == same(whole)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", sequence)
    assert whole.content[0].text == text[:begin]


def test_openais_routes_tell_what_ended_a_choice_as_vllm_does(stack):
    key = stack.key()
    asked = dict(BODY)

    def ended_by(path="/v1/chat/completions", **fields):
        choices = []
        for stream in (False, True):
            answer = send(stack.url, "POST", path, {**asked, **fields, "stream": stream}, key=key)
            assert answer.status == 200, answer.data
            if stream:
                chunks = [json.loads(event[6:]) for event in answer.data.split(b"\n\n")[:-2]]
                choices.append(chunks[-1]["choices"][0])
            else:
                choices += answer.json["choices"]
        whole, last_chunk = choices
        assert whole["stop_reason"] == last_chunk["stop_reason"]
        assert whole["finish_reason"] == last_chunk["finish_reason"]
        return whole["stop_reason"], whole["finish_reason"]

    text = send(stack.url, "POST", "/v1/chat/completions", asked, key=key).json["choices"][0]["message"][
        "content"
    ]
    assert ended_by() == (None, "length")
    assert ended_by(stop=[text[20:24]]) == (text[20:24], "stop")
    assert ended_by(stop_token_ids=[ord(text[20])]) == (ord(text[20]), "stop")
    assert ended_by(model="brief", max_tokens=500) == (None, "stop")
    assert ended_by(model="brief", max_tokens=500, stop_token_ids=[256]) == (None, "stop")
    del asked["messages"]
    asked["prompt"] = "tell me"
    prompted = send(stack.url, "POST", "/v1/completions", asked, key=key).json["choices"][0]["text"]
    assert ended_by("/v1/completions", stop=prompted[9:12]) == (prompted[9:12], "stop")
    assert ended_by("/v1/completions") == (None, "length")


def test_counted_tokens_are_those_of_the_prompt(client):
    options = {"model": "fake", "system": "Be brief.", "messages": [*USER, *USER]}
    counted = client.messages.count_tokens(**options)
    first = client.messages.create(**options, max_tokens=1).usage
    again = client.messages.create(**options, max_tokens=1).usage
    assert counted.input_tokens == first.input_tokens
    assert first.cache_read_input_tokens == 0
    assert again.cache_read_input_tokens > 0
    assert num_input_tokens(again) == counted.input_tokens


def test_what_an_answer_said_can_be_sent_back(client):
    with client.messages.stream(**ASKED) as stream:
        final = stream.get_final_message()
    messages = [*USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": "more"}]
    by_text = [*USER, {"role": "assistant", "content": final.content[0].text}, messages[-1]]
    again = client.messages.create(**{**ASKED, "messages": messages})
    assert same(again) == same(client.messages.create(**{**ASKED, "messages": by_text}))


def test_fields_without_effect_and_headers_of_anthropics_clients_are_taken(stack):
    client = client_of(stack, default_headers={"anthropic-beta": "prompt-caching-2024-07-31"})
    plain = client.messages.create(**ASKED, system="Be brief.")
    marked = client.messages.create(
        **ASKED,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u1"},
        service_tier="auto",
        thinking={"type": "disabled"},
        extra_query={"beta": "true"},
    )
    assert same(marked) == same(plain)


def test_the_key_may_come_as_a_bearer_token_and_the_version_is_not_demanded(stack):
    key = stack.key()
    bearer = anthropic.Anthropic(base_url=stack.url, auth_token=key, api_key=None, max_retries=0)
    assert bearer.messages.create(**ASKED).stop_reason == "max_tokens"
    answer = send(stack.url, "POST", "/v1/messages", BODY, headers={"x-api-key": key})
    assert answer.status == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_arrive_as_the_clients_own_exceptions(stack, client):
    with pytest.raises(anthropic.AuthenticationError) as unknown_key:
        client_of(stack, "hr-wrong").messages.create(**ASKED)
    assert unknown_key.value.body["error"]["type"] == "authentication_error"
    assert unknown_key.value.body["request_id"] == unknown_key.value.request_id

    with pytest.raises(anthropic.NotFoundError) as unknown_model:
        client.messages.create(**{**ASKED, "model": "nobody"})
    assert unknown_model.value.body["error"]["type"] == "not_found_error"

    image = {"type": "image", "source": {"type": "url", "url": "https://x.invalid/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\].*images"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})

    with pytest.raises(anthropic.BadRequestError, match="weight"):
        client.messages.create(**{**ASKED, "extra_body": {"weight": 1}})

    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x" * 9000}]})
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": "x" * 900_000}])

    with pytest.raises(anthropic.PermissionDeniedError) as forbidden:
        client_of(stack, stack.key("hasty")).messages.create(**{**ASKED, "model": "brief"})
    assert forbidden.value.body["error"]["type"] == "permission_error"


def test_a_rate_limit_says_when_to_come_back(stack):
    hasty = client_of(stack, stack.key("hasty"))
    hasty.messages.create(**ASKED)
    with pytest.raises(anthropic.RateLimitError):  # counting counts, too
        hasty.messages.count_tokens(model="fake", messages=USER)
    with pytest.raises(anthropic.RateLimitError) as limited:
        hasty.messages.create(**ASKED)
    assert limited.value.body["error"]["type"] == "rate_limit_error"
    assert int(limited.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b" " * 40_000_000, 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", {"model": "fake"}, 400, "invalid_request_error"),
    ],
)
def test_what_never_reaches_a_model_is_refused_in_the_same_shape(stack, method, path, body, status, kind):
    answer = send(stack.url, method, path, body, key=stack.key(), headers={"x-request-id": "mine"})
    assert answer.status == status
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", kind)
    assert answer.json["request_id"] == answer.headers["request-id"] == "mine"
    assert answer.headers["x-should-retry"] == "false"
    elsewhere = send(stack.url, "POST", "/v1/chat/completions", {}, key=stack.key())
    assert "type" not in elsewhere.json
    assert "request-id" not in elsewhere.headers


def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error(stack, client):
    asked = {**ASKED, "model": "mortal", "max_tokens": 3000}
    seen = []

    def read():
        for event in client.messages.create(**asked, stream=True):
            if event.type == "content_block_delta" and "content_block_delta" not in seen:
                stack.kill("mortal-0")
            seen.append(event.type)

    with pytest.raises(anthropic.APIStatusError) as interrupted:
        read()
    assert interrupted.value.body["error"]["type"] == "api_error"
    assert "interrupted" in interrupted.value.body["error"]["message"]
    assert "content_block_delta" in seen
    assert "message_stop" not in seen
    with pytest.raises(anthropic.InternalServerError) as refused:
        client.messages.create(**asked)
    assert (refused.value.status_code, refused.value.body["error"]["type"]) == (503, "overloaded_error")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    stack.start_engine("mortal", 0)
    stack.wait_ready()
