"""The official client, unchanged, against real processes (with a model that needs no weights)."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.stack import Stack

USER = [{"role": "user", "content": "tell me something long enough"}]


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.key(), max_retries=0)


def test_a_chat_stream_adds_up_to_the_whole_answer(client):
    options = {"model": "fake", "messages": USER, "max_tokens": 40, "seed": 7, "temperature": 0.9}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert whole.object == "chat.completion"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage.completion_tokens == 40
    assert len(whole.choices[0].message.content) == 40


def test_all_parts_of_an_answer_name_the_system_that_made_it(client):
    options = {"model": "fake", "messages": USER, "max_tokens": 3}
    fingerprint = client.chat.completions.create(**options).system_fingerprint
    assert fingerprint.startswith("fp_")
    chunks = client.chat.completions.create(**options, stream=True)
    assert {chunk.system_fingerprint for chunk in chunks} == {fingerprint}
    completion = client.completions.create(model="fake", prompt="a", max_tokens=1)
    assert completion.system_fingerprint == fingerprint


@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_come_when_asked_for(client, n):
    options = {"model": "fake", "max_tokens": 6, "n": n, "seed": 5, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(messages=USER, **options)
    for choice in whole.choices:
        assert bytes(choice.token_ids).decode() == choice.message.content
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    streamed = {index: [] for index in range(n)}
    prompts = []
    for chunk in client.chat.completions.create(messages=USER, stream=True, **options):
        prompts += [chunk.prompt_token_ids] if hasattr(chunk, "prompt_token_ids") else []
        for choice in chunk.choices:
            streamed[choice.index] += getattr(choice, "token_ids", [])
    assert [streamed[index] for index in range(n)] == [choice.token_ids for choice in whole.choices]
    assert prompts[0] == whole.prompt_token_ids
    plain = client.completions.create(prompt=["ab", "c"], **options)
    assert [choice.prompt_token_ids for choice in plain.choices] == [[97, 98]] * n + [[99]] * n
    without = client.completions.create(model="fake", prompt="a", max_tokens=1)
    assert not hasattr(without.choices[0], "token_ids")


def test_a_completion_stream_adds_up_to_the_whole_answer(client):
    options = {"model": "fake", "prompt": "Once upon a time", "max_tokens": 24, "seed": 3}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage.prompt_tokens == 16
    assert whole.choices[0].finish_reason == "length"


def test_usage_comes_as_a_chunk_of_its_own_when_asked_for(client):
    options = {"model": "fake", "messages": USER, "max_tokens": 5, "stream": True}
    with_usage = list(client.chat.completions.create(**options, stream_options={"include_usage": True}))
    assert with_usage[-1].choices == []
    assert with_usage[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in with_usage[:-1])
    without = list(client.chat.completions.create(**options))
    assert all(chunk.choices for chunk in without)


def test_seeds_decide_and_choices_differ(client):
    options = {"model": "fake", "messages": USER, "max_tokens": 20}
    one = client.chat.completions.create(**options, seed=1, n=3)
    again = client.chat.completions.create(**options, seed=1, n=3)
    other = client.chat.completions.create(**options, seed=99)
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert other.choices[0].message.content not in texts
    assert one.usage.completion_tokens == 60


def test_several_choices_stream_interleaved_by_index(client):
    stream = client.chat.completions.create(
        model="fake", messages=USER, max_tokens=10, n=2, seed=1, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [len(text) for text in texts.values()] == [10, 10]


def test_several_prompts_are_answered_in_order(client):
    answer = client.completions.create(
        model="fake", prompt=["first", "second"], max_tokens=4, temperature=0, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="fake", prompt="second", max_tokens=4, temperature=0)
    assert answer.choices[2].text == alone.choices[0].text
    assert answer.usage.prompt_tokens == 11


def test_a_prompt_may_be_token_ids(client):
    by_text = client.completions.create(model="fake", prompt="hello", max_tokens=8, temperature=0)
    by_ids = client.completions.create(model="fake", prompt=list(b"hello"), max_tokens=8, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client, stack):
    options = {"model": "fake", "messages": USER, "max_tokens": 200, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    stop = text[50:54]
    begin = text.find(stop)
    answer = client.chat.completions.create(**options, stop=[stop])
    chunks = list(client.chat.completions.create(**options, stop=[stop], stream=True))
    assert answer.choices[0].message.content == text[:begin]
    assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[:begin]
    assert answer.usage.completion_tokens == begin + 4


def scores_of(choice):
    return [
        (entry.token, entry.logprob, [(top.token, top.logprob) for top in entry.top_logprobs])
        for entry in choice.logprobs.content
    ]


def test_log_probabilities_of_a_chat_are_the_same_streamed_and_whole(client):
    options = {
        "model": "fake", "messages": USER, "max_tokens": 30, "temperature": 0,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**options, n=2)
    streamed = {0: [], 1: []}
    for chunk in client.chat.completions.create(**options, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += scores_of(choice) if choice.logprobs else []
    assert [scores_of(choice) for choice in whole.choices] == list(streamed.values())
    assert sum(map(len, streamed.values())) == whole.usage.completion_tokens == 60
    for choice in whole.choices:
        entries = choice.logprobs.content
        assert "".join(entry.token for entry in entries) == choice.message.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
        for entry in entries:
            assert len(entry.top_logprobs) == 3
            assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (
                entry.token,
                entry.logprob,
            )


def test_log_probabilities_come_only_when_asked_for_and_alone_without_alternatives(client):
    options = {"model": "fake", "messages": USER, "max_tokens": 4}
    assert client.chat.completions.create(**options).choices[0].logprobs is None
    assert all(c.choices[0].logprobs is None for c in client.chat.completions.create(**options, stream=True))
    alone = client.chat.completions.create(**options, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in alone] == [[]] * 4
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**options, top_logprobs=2)
    assert refused.value.param == "top_logprobs"


def test_log_probabilities_of_a_completion_are_the_same_streamed_and_whole(client):
    options = {"model": "fake", "prompt": "Once upon a time", "max_tokens": 24, "seed": 3, "logprobs": 2}
    whole = client.completions.create(**options)
    expected = whole.choices[0].logprobs
    streamed = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**options, stream=True):
        for name, values in streamed.items():
            values += getattr(chunk.choices[0].logprobs, name) if chunk.choices[0].logprobs else []
    assert streamed == expected.model_dump()
    assert len(expected.tokens) == whole.usage.completion_tokens == 24
    assert expected.text_offset == list(range(24))
    assert "".join(expected.tokens) == whole.choices[0].text
    for token, logprob, top in zip(
        expected.tokens, expected.token_logprobs, expected.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert top[token] == logprob
    chosen_only = client.completions.create(**{**options, "logprobs": 0}).choices[0].logprobs
    assert [list(top) for top in chosen_only.top_logprobs] == [[token] for token in chosen_only.tokens]


def test_tokens_behind_a_stop_string_have_no_log_probabilities(client):
    options = {"model": "fake", "messages": USER, "max_tokens": 200, "temperature": 0, "logprobs": True}
    text = client.chat.completions.create(**options).choices[0].message.content
    stop = text[20:24]
    whole = client.chat.completions.create(**options, stop=stop)
    chunks = list(client.chat.completions.create(**options, stop=stop, stream=True))
    streamed = [score for c in chunks if c.choices[0].logprobs for score in scores_of(c.choices[0])]
    assert scores_of(whole.choices[0]) == streamed
    assert "".join(token for token, _, _ in streamed) == text[: text.find(stop) + 4]
    assert len(streamed) == whole.usage.completion_tokens


def test_bad_words_and_allowed_tokens_hold(client):
    options = {"model": "fake", "messages": USER, "max_tokens": 60, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    words = [text[10:12], text[30]]
    other = client.chat.completions.create(**options, extra_body={"bad_words": words})
    content = other.choices[0].message.content
    assert not any(word in content for word in words)
    assert len(content) == 60
    digits = client.chat.completions.create(**options, extra_body={"allowed_token_ids": list(b"0123456789")})
    assert digits.choices[0].message.content.isdigit()


def test_a_repeated_prompt_is_found_in_the_cache(client):
    options = {"model": "fake", "messages": [{"role": "user", "content": "cached " * 20}], "max_tokens": 2}
    first = client.chat.completions.create(**options)
    second = client.chat.completions.create(**options)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 128


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_errors_arrive_as_the_client_s_own_exceptions(client, stack):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=USER)
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=stack.url + "/v1", api_key="hr-wrong", max_retries=0).models.list()
