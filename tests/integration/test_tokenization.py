"""/tokenize, /detokenize and the render endpoints: what they tell is what generation and embedding do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors

from tests.http_client import Answer, send
from tests.models import write_tiny_model
from tests.stack import Stack, fake_model

MAX_LEN = 128
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wasser fällt \U0001f600"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model with special tokens around a text."""
    path = tmp_path_factory.mktemp("bert")
    write_tiny_model(
        path,
        "BertModel",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    tokenizer = FastTokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def stack(redis_url: str, tiny: Path) -> Iterator[Stack]:
    document = {
        "models": [
            fake_model("writer", max_model_len=MAX_LEN),
            {"name": "tiny", "source": str(tiny), "runner": "pooling", "num_threads": 1},
        ],
        "tenants": [{"name": "all"}, {"name": "rare", "requests_per_minute": 1}],
        "routes": [{"name": "org/writer", "split": [{"variant": "v", "model": "writer"}]}],
    }
    with Stack(redis_url, document) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


def post(stack: Stack, key: str, path: str, **fields: Any) -> Answer:
    return send(stack.url, "POST", path, {"model": "org/writer", **fields}, key=key)


# ---------------------------------------------------------------------- tokens and back


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_prompt_has_the_tokens_that_a_completion_has(stack, key, path):
    text = "Wasser fällt \U0001f600"
    told = post(stack, key, path, prompt=text)
    usage = post(stack, key, "/v1/completions", prompt=text, max_tokens=1).json["usage"]
    assert told.status == 200
    assert told.json["count"] == len(told.json["tokens"]) == usage["prompt_tokens"]
    assert told.json["max_model_len"] == MAX_LEN
    assert told.json["token_strs"] is None
    as_tokens = {"max_tokens": 5, "temperature": 0}
    by_text = post(stack, key, "/v1/completions", prompt=text, **as_tokens).json
    by_tokens = post(stack, key, "/v1/completions", prompt=told.json["tokens"], **as_tokens).json
    assert by_text["choices"] == by_tokens["choices"]


def test_a_chat_has_the_tokens_that_its_completion_has(stack, key):
    told = post(stack, key, "/tokenize", messages=CHAT).json
    usage = post(stack, key, "/v1/chat/completions", messages=CHAT, max_tokens=1).json["usage"]
    assert told["count"] == len(told["tokens"]) == usage["prompt_tokens"]
    # The very body of a completion is taken, too.
    assert post(stack, key, "/tokenize", messages=CHAT, max_tokens=1, stream=True).json == told


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_tokens_become_the_text_that_they_were(stack, key, path):
    text = "Wasser fällt \U0001f600"
    tokens = post(stack, key, "/tokenize", prompt=text, add_special_tokens=False).json["tokens"]
    answer = post(stack, key, path, tokens=tokens)
    assert (answer.status, answer.json) == (200, {"prompt": text})
    assert post(stack, key, path, tokens=[]).json == {"prompt": ""}


def test_the_spelling_of_each_token_is_told_on_request(stack, key, tiny):
    told = post(stack, key, "/tokenize", model="tiny", prompt="water falls", return_token_strs=True).json
    vocabulary = FastTokenizer.from_file(str(tiny / "tokenizer.json"))
    assert told["token_strs"] == [vocabulary.id_to_token(token_id) for token_id in told["tokens"]]


def test_an_embedding_model_has_the_tokens_that_it_embeds(stack, key):
    told = post(stack, key, "/tokenize", model="tiny", prompt="water falls").json
    usage = post(stack, key, "/v1/embeddings", model="tiny", input="water falls").json["usage"]
    assert told["count"] == usage["prompt_tokens"]
    assert (told["tokens"][0], told["tokens"][-1]) == (1, 2)
    bare = post(stack, key, "/tokenize", model="tiny", prompt="water falls", add_special_tokens=False).json
    assert bare["tokens"] == told["tokens"][1:-1]


def test_a_text_that_is_somewhat_too_long_is_counted(stack, key):
    """That is when clients want to know by how much."""
    assert post(stack, key, "/tokenize", prompt="a" * (MAX_LEN - 1)).json["count"] == MAX_LEN - 1


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
def test_what_is_no_text_and_no_token_is_400_and_named(stack, key, path, fields, param):
    answer = post(stack, key, path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_keys_models_and_limits_hold_as_for_the_other_endpoints(stack, key):
    assert post(stack, "hr-wrong", "/tokenize", prompt="a").status == 401
    assert post(stack, key, "/tokenize", prompt="a", model="nobody").status == 404
    rare = stack.key("rare")
    answer = post(stack, rare, "/tokenize", prompt="a")
    assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    for path, fields in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/chat/completions/render", {"messages": CHAT}),
    ):
        assert post(stack, rare, path, **fields).error["code"] == "rate_limit_exceeded"


# ---------------------------------------------------------------------- what would be sent


def test_a_chat_is_rendered_as_its_completion_would_send_it(stack, key):
    wish = {"messages": CHAT, "temperature": 0.5, "stop": "x", "top_k": 7, "bad_words": ["y"]}
    answer = post(stack, key, "/v1/chat/completions/render", **wish)
    told = answer.json
    assert answer.status == 200
    assert told["token_ids"] == post(stack, key, "/tokenize", messages=CHAT).json["tokens"]
    assert told["prompt"] == post(stack, key, "/detokenize", tokens=told["token_ids"]).json["prompt"]
    assert all(message["content"] in told["prompt"] for message in CHAT)
    params = told["sampling_params"]
    assert (params["temperature"], params["top_k"], params["stop"]) == (0.5, 7, ["x"])
    assert (params["top_p"], params["n"], params["bad_words"], params["seed"]) == (1.0, 1, ["y"], None)
    # Nothing was asked for: all that fits.
    assert params["max_tokens"] == MAX_LEN - len(told["token_ids"])
    assert (told["model"], told["stream"]) == ("org/writer", False)


def test_a_completion_is_rendered_prompt_by_prompt(stack, key):
    told = post(stack, key, "/v1/completions/render", prompt=["ab", "c"], n=2, seed=5).json
    assert [each["token_ids"] for each in told] == [
        post(stack, key, "/tokenize", prompt=text).json["tokens"] for text in ("ab", "c")
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
def test_a_form_is_told_under_vllms_names(stack, key, fields, expected):
    told = post(stack, key, "/v1/chat/completions/render", messages=CHAT, **fields).json
    assert told["sampling_params"]["structured_outputs"] == expected


def test_nothing_runs_for_what_is_rendered(stack, key):
    def num_prompt_tokens() -> list[str]:
        lines = stack.get("/metrics")[1].decode().splitlines()
        return [line for line in lines if line.startswith("vllm:prompt_tokens_total{")]

    before = num_prompt_tokens()
    answer = post(stack, key, "/v1/chat/completions/render", messages=CHAT, stream=True)
    assert answer.status == 200
    assert "x-headrace-engine" not in answer.headers
    assert num_prompt_tokens() == before


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
        {"messages": CHAT, "model": "tiny"},
        {"messages": CHAT, "nonsense": 1},
        {},
    ],
)
def test_the_errors_of_the_real_request_come_from_the_rendered_one(stack, key, fields):
    real = post(stack, key, "/v1/chat/completions", **fields)
    rendered = post(stack, key, "/v1/chat/completions/render", **fields)
    assert (rendered.status, rendered.error) == (real.status, real.error)
    assert 400 <= real.status < 500


# ---------------------------------------------------------------------- ids with slashes


@pytest.mark.parametrize("name", ["org/writer", "org%2Fwriter", "org%2fwriter"])
def test_a_model_with_a_slash_in_its_id_is_found_encoded_or_not(stack, key, name):
    answer = send(stack.url, "GET", f"/v1/models/{name}", key=key)
    assert (answer.status, answer.json["id"]) == (200, "org/writer")
    answer = send(stack.url, "GET", "/v1/models/org%2Fnobody", key=key)
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
