"""OpenAI's Python client, unchanged, against the default model: how it asks, stops, and tries again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import LONG
from tests.real_stack import ABSENT, EMBEDDER, HASTY, MODEL, RealStack
from tests.stack import wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 32, "temperature": 0}
LONG_WORK: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": LONG,
    "extra_body": {"ignore_eos": True},
}


class City(BaseModel):
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool


def client_of(stack: RealStack, tenant: str = "default", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.key_of(tenant), **options)


@pytest.fixture(scope="module")
def client(real_stack: RealStack) -> openai.OpenAI:
    return client_of(real_stack, max_retries=0, timeout=120)


@pytest.fixture
async def asynchronous(real_stack: RealStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=real_stack.url + "/v1", api_key=real_stack.key, max_retries=0, timeout=120
    ) as client:
        yield client


# ---------------------------------------------------------------------- asking


def test_a_question_is_answered_streamed_and_whole(client):
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in text


def test_the_stream_helper_ends_with_the_answer_that_comes_whole(client):
    whole = client.chat.completions.create(**GREEDY)
    with client.chat.completions.stream(**GREEDY, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert kinds[-2:] == ["content.done", "chunk"]  # the chunk of the usage
    assert "".join(event.delta for event in events if event.type == "content.delta") == events[-2].content
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_the_asynchronous_client_asks_several_things_at_once(client, asynchronous):
    numbered = [
        {"model": MODEL, "prompt": f"{number} and", "max_tokens": 12, "temperature": 0} for number in range(4)
    ]

    async def streamed(asked: dict[str, Any]) -> str:
        stream = await asynchronous.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    answers = await asyncio.gather(*(asynchronous.completions.create(**asked) for asked in numbered))
    texts = await asyncio.gather(*(streamed(asked) for asked in numbered))
    assert [answer.choices[0].text for answer in answers] == texts
    assert texts[0] == client.completions.create(**numbered[0]).choices[0].text


async def test_the_asynchronous_stream_helpers_parse_what_they_read(asynchronous):
    asked = {"model": MODEL, "temperature": 0}
    async with asynchronous.chat.completions.stream(
        **asked, messages=QUESTION, response_format=City, max_tokens=100
    ) as stream:
        chat = await stream.get_final_completion()
    async with asynchronous.responses.stream(
        **asked, input=QUESTION, text_format=City, max_output_tokens=100
    ) as stream:
        response = await stream.get_final_response()
    assert response.output_parsed == chat.choices[0].message.parsed
    assert isinstance(response.output_parsed, City)


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_pydantic_model_is_parsed_whole_and_streamed(client, endpoint):
    asked = {"model": MODEL, "temperature": 0}
    about = "Describe Paris as JSON."
    if endpoint == "chat":
        chat = {**asked, "messages": [{"role": "user", "content": about}], "response_format": City}
        whole = client.chat.completions.parse(**chat, max_tokens=100).choices[0].message.parsed
        with client.chat.completions.stream(**chat, max_tokens=100) as stream:
            streamed = stream.get_final_completion().choices[0].message.parsed
    else:
        response = {**asked, "input": about, "text_format": City, "max_output_tokens": 100}
        whole = client.responses.parse(**response).output_parsed
        with client.responses.stream(**response) as stream:
            streamed = stream.get_final_response().output_parsed
    assert isinstance(whole, City)
    assert streamed == whole


def test_an_answer_that_was_cut_is_not_parsed(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=City, max_tokens=2)


def test_a_response_is_streamed_kept_and_forgotten(client):
    asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 32, "temperature": 0}
    events = list(client.responses.create(**asked, stream=True))
    response = events[-1].response
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == response.output_text
    assert "Paris" in response.output_text
    assert client.responses.retrieve(response.id) == response
    [item] = client.responses.input_items.list(response.id)
    assert item.content[0].text == QUESTION[0]["content"]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_second_turn_reads_the_cache_of_the_first(client):
    options = {"model": MODEL, "temperature": 0, "max_output_tokens": 48}
    first = client.responses.create(**options, input="Tell me a story about a mill at a river.")
    second = client.responses.create(**options, input="Go on.", previous_response_id=first.id)
    num_known = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= num_known - 2


def test_texts_have_the_same_vectors_alone_and_together_and_in_both_encodings(client):
    texts = ["water falls to the turbine", "fox"]
    by_base64 = client.embeddings.create(model=EMBEDDER, input=texts)  # what it asks for by itself
    by_float = client.embeddings.create(model=EMBEDDER, input=texts, encoding_format="float")
    alone = client.embeddings.create(model=EMBEDDER, input=texts[1])
    assert [entry.index for entry in by_base64.data] == [0, 1]
    for one, other in zip(by_base64.data, by_float.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
    assert by_base64.data[1].embedding == pytest.approx(alone.data[0].embedding, abs=1e-5)
    assert by_base64.data[0].embedding != pytest.approx(alone.data[0].embedding, abs=1e-2)


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == [MODEL, EMBEDDER, ABSENT]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/such")


def test_every_answer_has_the_id_by_which_it_can_be_found_in_the_log(client):
    given = client.completions.with_raw_response.create(
        model=MODEL, prompt="a", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert given.parse()._request_id == given.request_id == "mine"
    chat = client.chat.completions.create(**{**GREEDY, "max_tokens": 1})
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**GREEDY, "temperature": 3})
    ids = {chat._request_id, refused.value.request_id, client.models.list()._request_id}
    assert len(ids) == 3
    assert None not in ids
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")


# ---------------------------------------------------------------------- stopping


def test_a_request_that_times_out_ends_on_the_engine_too(client, given_up_early):
    with given_up_early(), pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**LONG_WORK)


def test_a_stream_that_is_left_ends_on_the_engine_too(client, given_up_early):
    with given_up_early(), client.completions.create(**LONG_WORK, stream=True) as stream:
        assert next(stream).choices


def test_a_stream_helper_that_is_left_ends_on_the_engine_too(client, given_up_early):
    asked = {"model": MODEL, "input": QUESTION, "extra_body": {"ignore_eos": True}}
    with given_up_early(), client.responses.stream(**asked, max_output_tokens=LONG) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_task_that_is_cancelled_ends_on_the_engine_too(
    asynchronous, given_up_early, real_stack, is_streamed
):
    began = asyncio.Event()

    async def ask() -> None:
        answer = await asynchronous.completions.create(**LONG_WORK, stream=is_streamed)
        async for _ in answer:
            began.set()

    with given_up_early():
        task = asyncio.create_task(ask())
        if is_streamed:
            await asyncio.wait_for(began.wait(), 30)
        else:
            await asyncio.to_thread(wait_until, lambda: real_stack.gauges()["running"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# ---------------------------------------------------------------------- trying again


def test_a_rate_limit_is_waited_out_for_as_long_as_the_server_says(real_stack):
    """One more try, which comes after half a second by itself: too early."""
    hasty = client_of(real_stack, HASTY, max_retries=1).embeddings.with_raw_response
    hasty.create(model=EMBEDDER, input="one")
    assert hasty.create(model=EMBEDDER, input="two").retries_taken == 1
    impatient = client_of(real_stack, HASTY, max_retries=0)
    with pytest.raises(openai.RateLimitError) as limited:
        impatient.embeddings.create(model=EMBEDDER, input="three")
    assert limited.value.code == "rate_limit_exceeded"


def test_what_cannot_get_better_is_not_tried_again(real_stack):
    sent = []
    patient = client_of(real_stack, max_retries=3)
    patient._client.event_hooks["request"].append(sent.append)
    with pytest.raises(openai.BadRequestError):
        patient.completions.create(model=MODEL, prompt="a", max_tokens=10**6)
    with pytest.raises(openai.NotFoundError):
        patient.completions.create(model="nobody", prompt="a")
    assert len(sent) == 2


def test_an_engine_that_dies_ends_its_streams_and_the_next_request_waits_for_its_return(client, real_stack):
    begun = threading.Barrier(21)

    def read() -> str:
        stream = client.completions.create(**LONG_WORK, stream=True)
        try:
            for number, _ in enumerate(stream):
                if number == 0:
                    begun.wait(60)
        except openai.APIError as error:
            return str(error)
        return "ended as if it were complete"

    with ThreadPoolExecutor(20) as threads:
        streams = [threads.submit(read) for _ in range(20)]
        begun.wait(60)
        os.kill(real_stack.engine_pid(MODEL), signal.SIGKILL)
        ends = [stream.result(10) for stream in streams]
    assert all("interrupted" in end for end in ends), ends

    asked = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(**asked)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    patient = client.with_options(max_retries=30).completions.with_raw_response
    assert patient.create(**asked).retries_taken >= 1
