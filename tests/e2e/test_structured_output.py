"""Structured output from the default model."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from tests.real_stack import MODEL

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "is_capital": {"type": "boolean"},
        "landmarks": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
    },
    "required": ["city", "country", "is_capital", "landmarks"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe Paris as JSON."}]


def test_json_that_satisfies_its_schema_greedy_and_sampled(client):
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
    }
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "response_format": response_format}
    greedy = client.chat.completions.create(**options, temperature=0)
    sampled = client.chat.completions.create(**options, temperature=1.0, n=2, seed=1)
    for choice in (*greedy.choices, *sampled.choices):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = client.chat.completions.create(**options, temperature=0, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == greedy.choices[0].message.content


def test_a_choice_and_a_bad_regex(client):
    def ask(**structured_outputs):
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Is water wet? Yes or no."}],
            max_tokens=20,
            extra_body={"structured_outputs": structured_outputs},
        )

    assert ask(choice=["yes", "no"]).choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as refused:
        ask(regex="(")
    assert refused.value.param == "structured_outputs"
