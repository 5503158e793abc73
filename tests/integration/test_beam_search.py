"""Beam search through the whole stack, with the official client and a model that needs no weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine_service.fake_runner import FakeModel, digest_of
from shared.messages import Beam
from shared.sampling import SamplingParams
from tests.naive_beam_search import naive_beam_search
from tests.stack import Stack, fake_model, wait_until

PROMPT = "Once upon a time"
IDLE = {"in flight": 0, "running": 0, "waiting": 0, "blocks held": 0}
FIRST_TOKEN_TIMEOUT_S = 0.6


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    models = [
        fake_model(max_num_seqs=64),
        fake_model("slow", "step_delay_ms=40,eos_every=6"),
    ]
    gateway = {"first_token_timeout_s": FIRST_TOKEN_TIMEOUT_S}
    with Stack(redis_url, {"models": models, "gateway": gateway}) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.key(), max_retries=0)


def expected_beams(
    prompt: str, max_tokens: int, width: int, *, eos_every: int = 0, ignore_eos: bool = False
) -> list[Beam]:
    model = FakeModel(eos_every=eos_every)
    greedy = SamplingParams(max_tokens, 0, temperature=0.0)

    def likeliest(history: list[int], num_tokens: int) -> list[tuple[int, float]]:
        digest = digest_of(history)
        token_id = model.next_token(digest, len(history) - 1, greedy)
        return model.logprobs(digest, token_id, num_tokens).top

    return naive_beam_search(
        likeliest,
        list(prompt.encode()),
        width=width,
        max_tokens=max_tokens,
        end_token_ids=[] if ignore_eos else [model.eos_token_id],
    )


def text_of(beam: Beam) -> str:
    """One token is one byte; the token that ends it has no text."""
    return bytes(token_id for token_id in beam.token_ids if token_id < 256).decode()


def search(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 12, "extra_body": {"use_beam_search": True, **fields}}


def test_a_completion_has_the_best_beams_in_order(client):
    answer = client.completions.create(prompt=PROMPT, n=3, **search())
    beams = expected_beams(PROMPT, 12, 3)
    assert [choice.text for choice in answer.choices] == [text_of(beam) for beam in beams]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 3 * 12)


def test_best_of_is_the_width_and_n_of_the_beams_are_the_answer(client):
    answer = client.completions.create(prompt=PROMPT, n=2, best_of=6, **search())
    assert [choice.text for choice in answer.choices] == [
        text_of(beam) for beam in expected_beams(PROMPT, 12, 6)[:2]
    ]
    assert answer.usage.completion_tokens == 2 * 12


def test_beams_that_end_show_no_end_and_their_ends_are_counted(client):
    answer = client.completions.create(prompt=PROMPT, n=4, **{**search(), "model": "slow"})
    beams = expected_beams(PROMPT, 12, 4, eos_every=6)
    assert "stop" in {beam.finish_reason for beam in beams}
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [
        (text_of(beam), beam.finish_reason) for beam in beams
    ]
    assert answer.usage.completion_tokens == sum(len(beam.token_ids) for beam in beams)


def test_every_prompt_is_searched_for_itself_and_repeated_if_that_is_asked(client):
    prompts = ["first", "the second one"]
    answer = client.completions.create(prompt=prompts, n=2, echo=True, **search())
    assert [choice.text for choice in answer.choices] == [
        prompt + text_of(beam) for prompt in prompts for beam in expected_beams(prompt, 12, 2)
    ]


def test_a_chat_has_the_best_beams_and_tells_what_was_cached(client):
    messages = [{"role": "user", "content": "tell me something long enough to be cached"}]
    first = client.chat.completions.create(messages=messages, n=2, **search())
    again = client.chat.completions.create(messages=messages, n=2, **search())
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 2
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_a_long_search_passes_the_time_limit_of_a_first_token(client):
    fields = {**search(ignore_eos=True), "model": "slow", "max_tokens": 25}  # a second in all
    answer = client.completions.create(prompt=PROMPT, n=2, **fields)
    assert [choice.text for choice in answer.choices] == [
        text_of(beam) for beam in expected_beams(PROMPT, 25, 2, eos_every=6, ignore_eos=True)
    ]


def test_a_client_that_leaves_ends_all_beams(stack, client):
    fields = {**search(ignore_eos=True), "model": "slow", "max_tokens": 3000}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.4).completions.create(prompt=PROMPT, n=4, **fields)
    wait_until(lambda: stack.gauges() == IDLE, what="nothing left")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"logprobs": 2}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"65": 1}}, "logit_bias"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"extra_body": {"use_beam_search": True, "min_tokens": 2}}, "min_tokens"),
        ({"extra_body": {"use_beam_search": True, "length_penalty": 11}}, "length_penalty"),
        ({"extra_body": {"use_beam_search": False, "length_penalty": 2}}, "length_penalty"),
        (
            {"extra_body": {"use_beam_search": True, "structured_outputs": {"regex": "a+"}}},
            "structured_outputs",
        ),
        (
            {"extra_body": {"use_beam_search": True, "response_format": {"type": "json_object"}}},
            "response_format",
        ),
    ],
    ids=str,
)
def test_what_a_search_would_ignore_is_400_and_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt=PROMPT, **{**search(), **fields})
    assert refused.value.param == param
