"""/tokenize, /detokenize and the render endpoints: what they tell is what generation and embedding do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.http_client import Answer, send
from tests.integration.text_stack import BERT, WRITER, TextStack
from tests.integration.text_stack import WRITER_MAX_LEN as MAX_LEN

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wasser fällt \U0001f600"}]


def post(stack: TextStack, path: str, *, key: str | None = None, **fields: Any) -> Answer:
    return stack.post(path, key=key, **{"model": WRITER, **fields})


# ---------------------------------------------------------------------- tokens and back


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_prompt_has_the_tokens_that_a_completion_has(text_stack, path):
    text = "Wasser fällt \U0001f600"
    told = post(text_stack, path, prompt=text)
    usage = post(text_stack, "/v1/completions", prompt=text, max_tokens=1).json["usage"]
    assert told.status == 200
    assert told.json["count"] == len(told.json["tokens"]) == usage["prompt_tokens"]
    assert told.json["max_model_len"] == MAX_LEN
    assert told.json["token_strs"] is None
    as_tokens = {"max_tokens": 5, "temperature": 0}
    by_text = post(text_stack, "/v1/completions", prompt=text, **as_tokens).json
    by_tokens = post(text_stack, "/v1/completions", prompt=told.json["tokens"], **as_tokens).json
    assert by_text["choices"] == by_tokens["choices"]


def test_a_chat_has_the_tokens_that_its_completion_has(text_stack):
    told = post(text_stack, "/tokenize", messages=CHAT).json
    usage = post(text_stack, "/v1/chat/completions", messages=CHAT, max_tokens=1).json["usage"]
    assert told["count"] == len(told["tokens"]) == usage["prompt_tokens"]
    # The very body of a completion is taken, too.
    assert post(text_stack, "/tokenize", messages=CHAT, max_tokens=1, stream=True).json == told


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_tokens_become_the_text_that_they_were(text_stack, path):
    text = "Wasser fällt \U0001f600"
    tokens = post(text_stack, "/tokenize", prompt=text, add_special_tokens=False).json["tokens"]
    answer = post(text_stack, path, tokens=tokens)
    assert (answer.status, answer.json) == (200, {"prompt": text})
    assert post(text_stack, path, tokens=[]).json == {"prompt": ""}


def test_the_spelling_of_each_token_is_told_on_request(text_stack):
    told = post(text_stack, "/tokenize", model=BERT, prompt="water falls", return_token_strs=True).json
    vocabulary = FastTokenizer.from_file(str(text_stack.bert_path / "tokenizer.json"))
    assert told["token_strs"] == [vocabulary.id_to_token(token_id) for token_id in told["tokens"]]


def test_an_embedding_model_has_the_tokens_that_it_embeds(text_stack):
    told = post(text_stack, "/tokenize", model=BERT, prompt="water falls").json
    usage = post(text_stack, "/v1/embeddings", model=BERT, input="water falls").json["usage"]
    assert told["count"] == usage["prompt_tokens"]
    assert (told["tokens"][0], told["tokens"][-1]) == (1, 2)
    bare = post(text_stack, "/tokenize", model=BERT, prompt="water falls", add_special_tokens=False).json
    assert bare["tokens"] == told["tokens"][1:-1]


def test_a_text_that_is_somewhat_too_long_is_counted(text_stack):
    """That is when clients want to know by how much."""
    assert post(text_stack, "/tokenize", prompt="a" * (MAX_LEN - 1)).json["count"] == MAX_LEN - 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "a" * 1_000_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 100_000]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1] * (2**18 + 1)}, "tokens"),
    ],
)
def test_what_is_no_text_and_no_token_is_400_and_named(text_stack, path, fields, param):
    answer = post(text_stack, path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_keys_models_and_limits_hold_as_for_the_other_endpoints(text_stack):
    assert post(text_stack, "/tokenize", prompt="a", key="hr-wrong").status == 401
    assert post(text_stack, "/tokenize", prompt="a", model="nobody").status == 404
    rare = text_stack.key("rare")
    answer = post(text_stack, "/tokenize", prompt="a", key=rare)
    assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    for path, fields in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/chat/completions/render", {"messages": CHAT}),
    ):
        assert post(text_stack, path, **fields, key=rare).error["code"] == "rate_limit_exceeded"


# ---------------------------------------------------------------------- what would be sent


def test_a_chat_is_rendered_as_its_completion_would_send_it(text_stack):
    wish = {"messages": CHAT, "temperature": 0.5, "stop": "x", "top_k": 7, "bad_words": ["y"]}
    answer = post(text_stack, "/v1/chat/completions/render", **wish)
    told = answer.json
    assert answer.status == 200
    assert told["token_ids"] == post(text_stack, "/tokenize", messages=CHAT).json["tokens"]
    assert told["prompt"] == post(text_stack, "/detokenize", tokens=told["token_ids"]).json["prompt"]
    assert all(message["content"] in told["prompt"] for message in CHAT)
    params = told["sampling_params"]
    assert (params["temperature"], params["top_k"], params["stop"]) == (0.5, 7, ["x"])
    assert (params["top_p"], params["n"], params["bad_words"], params["seed"]) == (1.0, 1, ["y"], None)
    # Nothing was asked for: all that fits.
    assert params["max_tokens"] == MAX_LEN - len(told["token_ids"])
    assert (told["model"], told["stream"]) == ("org/writer", False)


def test_a_completion_is_rendered_prompt_by_prompt(text_stack):
    told = post(text_stack, "/v1/completions/render", prompt=["ab", "c"], n=2, seed=5).json
    assert [each["token_ids"] for each in told] == [
        post(text_stack, "/tokenize", prompt=text).json["tokens"] for text in ("ab", "c")
    ]
    params = told[0]["sampling_params"]
    assert (params["max_tokens"], params["n"], params["seed"]) == (16, 2, 5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}},
            {"json": json.dumps({"a": 1})},
        ),
        ({}, None),
    ],
)
def test_a_form_is_told_under_vllms_names(text_stack, fields, expected):
    told = post(text_stack, "/v1/chat/completions/render", messages=CHAT, **fields).json
    assert told["sampling_params"]["structured_outputs"] == expected


def test_nothing_runs_for_what_is_rendered(text_stack):
    before = text_stack.num_prompt_tokens
    answer = post(text_stack, "/v1/chat/completions/render", messages=CHAT, stream=True)
    assert answer.status == 200
    assert "x-headrace-engine" not in answer.headers
    assert text_stack.num_prompt_tokens == before


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "a" * MAX_LEN}]},
        {"messages": CHAT, "max_tokens": MAX_LEN},
        {"messages": CHAT, "temperature": 3},
        {"messages": CHAT, "logit_bias": {"100000": 1}},
        {"messages": CHAT, "stop_token_ids": [100_000]},
        {"messages": CHAT, "use_beam_search": True, "temperature": 0.5},
        {"messages": CHAT, "model": "nobody"},
        {"messages": CHAT, "model": BERT},
        {"messages": CHAT, "nonsense": 1},
        {},
    ],
)
def test_the_errors_of_the_real_request_come_from_the_rendered_one(text_stack, fields):
    real = post(text_stack, "/v1/chat/completions", **fields)
    rendered = post(text_stack, "/v1/chat/completions/render", **fields)
    assert (rendered.status, rendered.error) == (real.status, real.error)
    assert 400 <= real.status < 500


# ---------------------------------------------------------------------- ids with slashes


@pytest.mark.parametrize("name", ["org/writer", "org%2Fwriter", "org%2fwriter"])
def test_a_model_with_a_slash_in_its_id_is_found_encoded_or_not(text_stack, name):
    answer = send(text_stack.url, "GET", f"/v1/models/{name}", key=text_stack.secret)
    assert (answer.status, answer.json["id"]) == (200, "org/writer")
    answer = send(text_stack.url, "GET", "/v1/models/org%2Fnobody", key=text_stack.secret)
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
