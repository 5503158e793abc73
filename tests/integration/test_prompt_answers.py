"""What answers tell of their prompts, and the best of several answers: through the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine_service.fake_runner import FakeModel
from shared.sampling import SamplingParams
from tests.http_client import Answer, send
from tests.stack import Stack, fake_model, wait_until

MODEL = FakeModel(eos_token_id=256)  # what the stack's engines run
PROMPT = "tell me, é🙂 or so, something that is long enough"
TOKENS = list(PROMPT.encode())  # one for each byte
USER = [{"role": "user", "content": PROMPT}]
CHUNK = 16


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    document = {"models": [fake_model(max_num_batched_tokens=CHUNK, max_num_seqs=CHUNK, max_model_len=512)]}
    with Stack(redis_url, document) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


@pytest.fixture(scope="module")
def client(stack: Stack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=key, max_retries=0)


def post(stack: Stack, key: str, path: str, **fields: Any) -> Answer:
    return send(stack.url, "POST", path, {"model": "fake", **fields}, key=key)


def logprobs_of(token_ids: list[int], num_top: int = 0) -> list[float]:
    """Of each token but the first."""
    return [one.logprob for one in MODEL.score_prompt(token_ids, num_top)]


# -------------------------------------------------------------------------- echo


def test_prompts_are_scored_as_evaluation_harnesses_ask_for_it(client: openai.OpenAI) -> None:
    """The request and its evaluation are those of lm-evaluation-harness's local-completions."""
    contexts, continuations = [b"the capital of France is", b"2 + 2 ="], [b" Paris", b" 4"]
    prompts = [list(a + b) for a, b in zip(contexts, continuations, strict=True)]
    for _ in range(2):  # the second time everything is in the prefix cache
        answer = client.completions.create(
            model="fake", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
        )
        for choice, context, prompt in zip(answer.choices, contexts, prompts, strict=True):
            token_logprobs = choice.logprobs.token_logprobs
            assert len(token_logprobs) == len(prompt) + 1
            start = len(context)
            told = token_logprobs[start:-1]
            assert told == logprobs_of(prompt)[start - 1 :]
            is_greedy = [
                logprob == max(top.values())
                for logprob, top in zip(told, choice.logprobs.top_logprobs[start:-1], strict=True)
            ]
            assert is_greedy == [one.rank == 1 for one in MODEL.score_prompt(prompt, 1)[start - 1 :]]
        assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("prompt", [PROMPT, TOKENS], ids=["text", "tokens"])
def test_an_echo_begins_with_the_prompt_and_its_scores(client: openai.OpenAI, prompt: Any) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": prompt, "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**options)
    answer = client.completions.create(**options, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text == PROMPT + plain.choices[0].text
    assert answer.usage.prompt_tokens == len(TOKENS)
    assert answer.usage.completion_tokens == 6
    told = choice.logprobs
    assert told.token_logprobs[: len(TOKENS)] == [None, *logprobs_of(TOKENS)]
    assert told.top_logprobs[0] is None
    assert all(len(top) in (2, 3) and token in top for token, top in
               zip(told.tokens[1:], told.top_logprobs[1:], strict=True))  # fmt: skip
    begins = [len(PROMPT.encode()[:index].decode(errors="ignore")) for index in range(len(TOKENS))]
    assert told.text_offset == begins + [len(PROMPT) + index for index in range(6)]
    without = client.completions.create(**options, echo=True)
    assert (without.choices[0].text, without.choices[0].logprobs) == (choice.text, None)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echoed_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, max_tokens: int) -> None:
    options: dict[str, Any] = {
        "model": "fake", "prompt": [PROMPT, "another"], "n": 2, "seed": 5, "echo": True,
        "max_tokens": max_tokens, "logprobs": 1,
    }  # fmt: skip
    whole = client.completions.create(**options)
    texts = [""] * 4
    scores: list[list[Any]] = [[] for _ in range(4)]
    firsts: dict[int, str] = {}
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            firsts.setdefault(choice.index, choice.text)
            texts[choice.index] += choice.text
            scores[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert scores == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert all(firsts[index].startswith((PROMPT, "another")[index // 2]) for index in range(4))
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens == 4 * max_tokens


def test_no_token_is_generated_where_none_is_wanted(client: openai.OpenAI) -> None:
    stop = client.completions.create(model="fake", prompt=TOKENS, max_tokens=1, temperature=0).choices[0].text
    for options in ({}, {"stop": stop}, {"extra_body": {"stop_token_ids": list(stop.encode())}}):
        answer = client.completions.create(
            model="fake", prompt=TOKENS, max_tokens=0, temperature=0, echo=True, logprobs=0, **options
        )
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")
        assert choice.logprobs.token_logprobs == [None, *logprobs_of(TOKENS)]
        assert choice.logprobs.top_logprobs[1:] == [
            {token: logprob}
            for token, logprob in zip(choice.logprobs.tokens[1:], logprobs_of(TOKENS), strict=True)
        ]
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, len(TOKENS))


# -------------------------------------------------------------------------- prompt_logprobs


def expected_prompt_logprobs(token_ids: list[int], num_top: int) -> list[dict[str, Any] | None]:
    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = bytes([token_id]).decode(errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    expected: list[dict[str, Any] | None] = [None]
    for one in MODEL.score_prompt(token_ids, num_top):
        entries = {str(one.token_id): entry(one.token_id, one.logprob, one.rank)}
        for rank, (token_id, logprob) in enumerate(one.top, start=1):
            entries.setdefault(str(token_id), entry(token_id, logprob, rank))
        expected.append(entries)
    return expected


def test_prompt_logprobs_of_completions_are_told_with_each_choice(stack: Stack, key: str) -> None:
    long = [33 + index % 90 for index in range(400)]  # written beside the event loop
    fields = {"prompt": [TOKENS, long], "n": 2, "max_tokens": 2, "prompt_logprobs": 3, "seed": 1}
    first = post(stack, key, "/v1/completions", **fields).json["choices"]
    again = post(stack, key, "/v1/completions", **fields).json["choices"]
    assert first == again
    assert [choice["prompt_logprobs"] for choice in first] == [
        expected_prompt_logprobs(token_ids, 3) for token_ids in (TOKENS, TOKENS, long, long)
    ]
    assert all(choice["logprobs"] is None for choice in first)


def test_only_the_first_choice_computes_the_prompt_for_its_scores(stack: Stack, key: str) -> None:
    def num_hits() -> int:
        return sum(engine["load"]["prefix_cache_hits"] for engine in stack.admin_status()["engines"])

    fields = {"prompt": "never said before, and long enough for blocks", "n": 3, "max_tokens": 2}
    wait_until(lambda: not any(stack.gauges().values()), what="an idle stack")
    before = num_hits()
    post(stack, key, "/v1/completions", **fields, prompt_logprobs=1, echo=True, logprobs=1)
    wait_until(lambda: num_hits() - before >= 2 * 32, 5, "hits of the other two choices")


def test_prompt_logprobs_of_a_chat_are_told_once(stack: Stack, key: str) -> None:
    answer = post(
        stack, key, "/v1/chat/completions", messages=USER, n=2, max_tokens=3, prompt_logprobs=0
    ).json
    told = answer["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == answer["usage"]["prompt_tokens"]
    assert "".join(entry["decoded_token"] for one in told[1:] for entry in one.values()).endswith(
        "<|assistant|>"
    )
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    plain = post(stack, key, "/v1/chat/completions", messages=USER, max_tokens=3).json
    assert "prompt_logprobs" not in plain


# -------------------------------------------------------------------------- best_of


def test_the_best_of_several_are_those_with_the_highest_log_probability_per_token(
    client: openai.OpenAI,
) -> None:
    options: dict[str, Any] = {
        "model": "fake",
        "prompt": [PROMPT, "b"],
        "seed": 3,
        "max_tokens": 8,
        "stop": "e",
    }
    everything = client.completions.create(**options, n=6, logprobs=0)
    expected = []
    for start in (0, 6):
        ranked = sorted(
            everything.choices[start : start + 6],
            key=lambda choice: -sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs),
        )
        assert [choice.index for choice in ranked] != list(range(start, start + 6)), "nothing to rank"
        expected += [choice.text for choice in ranked[:2]]
    assert len(set(expected)) == 4
    best = client.completions.create(**options, n=2, best_of=6)
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage == everything.usage
    [one, other] = client.completions.create(**options, best_of=6, logprobs=2).choices
    assert [one.text, other.text] == expected[::2]
    assert len(one.logprobs.tokens) == len(one.logprobs.top_logprobs) <= 8
    assert all(len(top) == 2 for top in one.logprobs.top_logprobs)


def test_with_nothing_to_choose_from_an_answer_is_as_without_best_of(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "seed": 3, "max_tokens": 8, "n": 3}
    expected = [choice.text for choice in client.completions.create(**options).choices]
    assert [choice.text for choice in client.completions.create(**options, best_of=3).choices] == expected
    texts = [""] * 3
    for chunk in client.completions.create(**options, best_of=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


# -------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 16, "prompt": ["a"] * 9}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt": ["x" * 400] * 32, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": ["x" * 400] * 64, "echo": True, "n": 2, "logprobs": 5}, "logprobs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_go_together_is_400_and_named(
    stack: Stack, key: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(stack, key, "/v1/completions", **({"prompt": "a"} | fields))
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_chat_refuses_to_stream_prompt_logprobs_and_to_generate_nothing(stack: Stack, key: str) -> None:
    for fields, param in (
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True}, "echo"),
    ):
        answer = post(stack, key, "/v1/chat/completions", messages=USER, **fields)
        assert (answer.status, answer.error["param"]) == (400, param)


def test_an_echo_ends_behind_a_stop_string_and_everything_is_given_back(
    client: openai.OpenAI, stack: Stack
) -> None:
    sampling = SamplingParams(max_tokens=40, seed=0, temperature=0.0)
    stop = bytes(MODEL.generate(TOKENS, 3, sampling)).decode()
    answer = client.completions.create(
        model="fake", prompt=TOKENS, max_tokens=40, temperature=0, n=3, echo=True, logprobs=1, stop=stop
    )
    assert [choice.text for choice in answer.choices] == [PROMPT] * 3
    assert answer.usage.completion_tokens == 9
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[: len(TOKENS)] == [None, *logprobs_of(TOKENS)]
        assert len(choice.logprobs.tokens) == len(TOKENS) + 3
    wait_until(lambda: not any(stack.gauges().values()), what="an idle stack")
