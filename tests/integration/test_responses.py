"""`/v1/responses` by the official client, against real processes (with a model that needs no weights)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import Response

from shared.identifiers import TenantId
from tests.http_client import send
from tests.stack import Stack, fake_model, wait_until
from tests.valkey_server import running_valkey

DOCUMENT = {
    "models": [fake_model()],
    "tenants": [{"name": "one"}, {"name": "two"}],
    "gateway": {"responses_ttl_s": 1000, "max_stored_response_bytes": 20_000},
}
OPTIONS = {"model": "fake", "temperature": 0, "max_output_tokens": 40}
LONG_QUESTION = "tell me something that is long enough to fill a few blocks of the cache"


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, dict(DOCUMENT)) as stack:
        yield stack


def client_of(stack: Stack, tenant: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.key(tenant), max_retries=0)


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return client_of(stack)


def without_times_and_ids(response: Response) -> dict:
    document = response.model_dump(exclude={"id", "created_at", "completed_at", "usage"})
    for item in document["output"]:
        item["id"] = None
    return document


def test_a_response_says_what_a_chat_completion_says(client):
    response = client.responses.create(**OPTIONS, input=LONG_QUESTION, instructions="Be brief.")
    chat = client.chat.completions.create(
        model="fake",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG_QUESTION}],
        max_tokens=40,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert (response.usage.output_tokens, response.status) == (40, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.to_dict()["store"] is True
    Response.model_validate(response.to_dict())


def test_the_last_event_of_a_stream_has_the_response_that_comes_whole(client):
    whole = client.responses.create(**OPTIONS, input=LONG_QUESTION)
    events = list(client.responses.create(**OPTIONS, input=LONG_QUESTION, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text
    last = events[-1].response
    assert without_times_and_ids(last) == without_times_and_ids(whole)
    assert client.responses.retrieve(last.id) == last


def test_the_clients_own_stream_helper_follows_the_events(client, stack):
    text = client.responses.create(**OPTIONS, input=LONG_QUESTION).output_text
    options = {**OPTIONS, "extra_body": {"stop": [text[20:24]]}}  # so that it ends by itself
    with client.responses.stream(**options, input=LONG_QUESTION) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == snapshots[-1] == text[: text.find(text[20:24])]


def test_a_stream_ends_without_the_word_of_chat_completions(stack):
    body = {"model": "fake", "input": "hi", "max_output_tokens": 2, "stream": True}
    answer = send(stack.url, "POST", "/v1/responses", body, key=stack.key())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert b"[DONE]" not in answer.data
    assert answer.data.startswith(b"event: response.created\ndata: {")


def test_a_chain_of_turns_sees_all_of_them_and_reads_the_cache_of_the_last(client):
    turn = client.responses.create(**OPTIONS, input=LONG_QUESTION, instructions="Be brief.")
    said = [{"role": "user", "content": LONG_QUESTION}, {"role": "assistant", "content": turn.output_text}]
    for number in range(5):
        question = f"and number {number}?"
        turn = client.responses.create(**OPTIONS, input=question, previous_response_id=turn.id)
        said.append({"role": "user", "content": question})
        in_one = client.responses.create(**OPTIONS, input=said, store=False)
        assert turn.output_text == in_one.output_text
        if number:  # instructions are for one turn: without them the prompt begins anew, once
            assert turn.usage.input_tokens_details.cached_tokens >= in_one.usage.input_tokens - 64
        said.append({"role": "assistant", "content": turn.output_text})
    items = list(client.responses.input_items.list(turn.id, order="asc", limit=3))
    texts = [item.content[0].text for item in items]
    assert texts == [message["content"] for message in said[:-1]]
    assert len({item.id for item in items}) == len(items)
    newest = client.responses.input_items.list(turn.id, limit=1)
    assert newest.data[0].content[0].text == "and number 4?"
    assert newest.has_more


def test_items_can_be_sent_back_as_they_came_or_by_their_ids(client):
    first = client.responses.create(**OPTIONS, input=LONG_QUESTION)
    question = {"role": "user", "content": LONG_QUESTION}
    more = {"role": "user", "content": "more"}
    chained = client.responses.create(**OPTIONS, input="more", previous_response_id=first.id)
    by_value = client.responses.create(**OPTIONS, input=[question, *first.output, more])
    reference = {"type": "item_reference", "id": first.output[0].id}
    by_id = client.responses.create(**OPTIONS, input=[question, reference, more])
    assert chained.output_text == by_value.output_text == by_id.output_text
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**OPTIONS, input=[{"type": "item_reference", "id": "msg_" + "0" * 28}])
    assert refused.value.code == "item_not_found"


def test_the_tokens_of_an_input_are_counted_as_a_response_counts_them(client):
    first = client.responses.create(model="fake", input="hi", max_output_tokens=4)
    asked = {"model": "fake", "input": "go on", "previous_response_id": first.id, "instructions": "Be brief."}
    counted = client.responses.input_tokens.count(**asked)
    answered = client.responses.create(**asked, max_output_tokens=1)
    assert counted.input_tokens == answered.usage.input_tokens > first.usage.input_tokens


def test_a_response_is_kept_until_it_is_deleted(client):
    kept = client.responses.create(**OPTIONS, input="hi", metadata={"a": "b"})
    assert client.responses.retrieve(kept.id) == kept
    client.responses.delete(kept.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as refused:
            call(kept.id)
        assert refused.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**OPTIONS, input="hi", previous_response_id=kept.id)
    assert (refused.value.code, refused.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_the_response_of_another_tenant_is_one_that_never_was(client, stack):
    kept = client.responses.create(**OPTIONS, input="hi")
    other = client_of(stack, "two")
    with pytest.raises(openai.NotFoundError) as of_another:
        other.responses.retrieve(kept.id)
    never = "resp_" + "0" * 24
    with pytest.raises(openai.NotFoundError) as of_nobody:
        other.responses.retrieve(never)
    assert of_another.value.message.replace(kept.id, never) == of_nobody.value.message
    with pytest.raises(openai.NotFoundError):
        other.responses.delete(kept.id)
    reference = {"type": "item_reference", "id": kept.output[0].id}
    with pytest.raises(openai.BadRequestError):
        other.responses.create(**OPTIONS, input=[reference])
    assert client.responses.retrieve(kept.id).id == kept.id


def test_a_response_lives_as_long_as_configured(client, stack):
    kept = client.responses.create(**OPTIONS, input="hi")
    lifetime_s = stack.redis.ttl(stack.keys.response(TenantId("one"), kept.id))
    assert 900 < lifetime_s <= 1000


def test_a_record_that_makes_no_sense_is_none(client, stack):
    kept = client.responses.create(**OPTIONS, input="hi")
    stack.redis.set(stack.keys.response(TenantId("one"), kept.id), b'{"response": 7}')
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_what_is_not_to_be_stored_or_too_large_is_answered_and_not_stored(client, stack):
    is_large = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    for options in ({"store": False, "input": "hi"}, {"input": "hi", **is_large}):
        answer = client.responses.create(**{**OPTIONS, **options})
        assert answer.to_dict()["store"] is False
        assert answer.output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


def test_only_responses_in_the_background_can_be_cancelled(client):
    kept = client.responses.create(**OPTIONS, input="hi")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(kept.id)
    assert "background" in refused.value.message


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_1", "after"),
    ],
)
def test_questions_about_a_response_that_make_no_sense_name_their_parameter(client, stack, path, param):
    kept = client.responses.create(**OPTIONS, input="hi")
    answer = send(stack.url, "GET", f"/v1/responses/{kept.id}{path}", key=stack.key("one"))
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "x" * 10**6}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"max_tokens": 5}, "max_tokens"),  # no field of this API: called as the client calls it
    ],
)
def test_what_the_model_cannot_do_is_refused_in_the_words_of_this_api(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", **{"input": "hi", "extra_body": fields})
    assert refused.value.param == param


def test_log_probabilities_come_with_the_text(client):
    response = client.responses.create(
        **OPTIONS, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = response.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}


def test_an_answer_outlives_a_redis_that_is_frozen(tmp_path):
    """Frozen while the answer comes: what is generated is told, and says that it is not stored."""
    document = {"models": [fake_model(options="step_delay_ms=20")], "redis": {"timeout_ms": 100}}
    with running_valkey(tmp_path) as url, Stack(url, document) as stack:
        client = openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.key(), max_retries=0)
        pid = stack.redis.info("server")["process_id"]
        kept = client.responses.create(**OPTIONS, input="hi")
        stream = client.responses.create(**OPTIONS, input="hi", stream=True)
        events = [next(stream) for _ in range(6)]
        os.kill(pid, signal.SIGSTOP)
        try:
            events += list(stream)
            with pytest.raises(openai.InternalServerError) as refused:
                client.responses.retrieve(kept.id)
            assert refused.value.status_code == 503
        finally:
            os.kill(pid, signal.SIGCONT)
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.to_dict()["store"] is False
        assert events[-1].response.output_text == kept.output_text

        def is_back():
            try:
                return client.responses.retrieve(kept.id) == kept
            except openai.InternalServerError:
                return False

        wait_until(is_back, what="stored responses again")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(events[-1].response.id)


def test_a_redis_that_takes_no_more_costs_the_memory_and_nothing_else(tmp_path):
    with running_valkey(tmp_path) as url, Stack(url, {"models": [fake_model()]}) as stack:
        client = openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.key(), max_retries=0)
        client.responses.create(**OPTIONS, input="hi")
        stack.redis.config_set("maxmemory", "1")
        stack.redis.config_set("maxmemory-policy", "noeviction")
        answer = client.responses.create(**OPTIONS, input="hi")
        assert answer.output_text
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):  # not 503: Redis is there
            client.responses.retrieve(answer.id)


def test_an_engine_that_dies_leaves_an_error_and_a_failed_response(redis_url):
    with Stack(redis_url, {"models": [fake_model(options="step_delay_ms=20")]}) as stack:
        client = openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.key(), max_retries=0)
        options = {**OPTIONS, "max_output_tokens": 400}
        stream = client.responses.create(**options, input="hi", stream=True)
        events = [next(stream) for _ in range(6)]
        stack.kill("fake-0")
        events += list(stream)
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert events[-1].response.status == "failed"
        assert events[-1].response.error.code == "server_error"
        assert events[-1].response.output_text
