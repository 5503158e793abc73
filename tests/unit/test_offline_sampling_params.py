"""What a user writes is checked where it is written, under vLLM's names."""

from __future__ import annotations

import math

import pytest

from engine_service import SamplingParams, StructuredOutputsParams


def test_names_and_defaults_are_those_of_vllm():
    params = SamplingParams()
    defaults = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "bad_words": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "logit_bias": None,
        "allowed_token_ids": None,
        "structured_outputs": None,
    }
    assert {name: getattr(params, name) for name in defaults} == defaults


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("n", True),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 7),
        ("stop_token_ids", [-1]),
        ("logprobs", -1),
        ("allowed_token_ids", []),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("detokenize", False),
        ("structured_outputs", "json"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_an_unknown_field_is_refused_with_the_nearest_one():
    with pytest.raises(TypeError, match=r"'temprature'; did you mean 'temperature'\?"):
        SamplingParams(temprature=1)


def test_exactly_one_form_is_asked_for():
    assert StructuredOutputsParams(json={"type": "object"}).to_engine().kind == "json_schema"
    assert StructuredOutputsParams(choice=["a", "b"]).to_engine().text == '["a", "b"]'
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["a"])
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams()
