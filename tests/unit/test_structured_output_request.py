"""The fields that ask for a form: what they mean to the engine, and how wrong ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.openai.sampling import sampling_of
from gateway.openai.schema import ChatCompletionBody, CompletionBody, check_body
from shared.messages import ModelCard
from shared.sampling import StructuredOutput

CARD = ModelCard("m", "llama", 1000, 64, 8, 16, 100, "float32", [2])
SCHEMA = {"type": "object", "properties": {"ü": {"type": "integer"}}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def asked(**fields: Any) -> StructuredOutput | None:
    body = check_body(ChatCompletionBody, chat(**fields))
    sampling = sampling_of(body, CARD, [3], "messages", form=body.form)
    assert sampling.structured_output == body.form
    plain = check_body(CompletionBody, {"model": "m", "prompt": "hi", **fields})
    assert plain.form == body.form
    return body.form


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **fields}}


def test_openai_s_formats():
    assert asked() is None
    assert asked(response_format=None) is None
    assert asked(response_format={"type": "text"}) is None
    assert asked(response_format={"type": "json_object"}) == StructuredOutput("json_object")
    for strict in (True, False, None):
        form = asked(response_format=json_schema(strict=strict, description="what I want"))
        assert form is not None
        assert (form.kind, json.loads(form.text), form.is_strict) == ("json_schema", SCHEMA, bool(strict))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_object": True}, "json_object", ""),
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"grammar": 'start: "a"', "regex": None, "json_object": False}, "grammar", 'start: "a"'),
    ],
)
def test_vllm_s_structured_outputs(given, kind, text):
    form = asked(structured_outputs=given)
    assert form is not None
    assert (form.kind, form.text) == (kind, text)


def test_the_order_of_properties_is_kept():
    schema = {"type": "object", "properties": {name: {} for name in "zyxabc"}}
    form = asked(structured_outputs={"json": schema})
    assert form is not None
    assert list(json.loads(form.text)["properties"]) == list("zyxabc")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {**json_schema(), "type": "json_object"}}, "response_format"),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(schema=[1])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema="{}")}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(strict=1)}, "response_format.json_schema.strict"),
        ({"response_format": json_schema(extra=1)}, "response_format.json_schema.extra"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"grammer": "x"}}, "structured_outputs.grammer"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_a_wrong_one_is_refused_with_its_field(fields, param):
    with pytest.raises(ApiError) as caught:
        check_body(ChatCompletionBody, chat(**fields))
    assert caught.value.status == 400
    assert caught.value.param == param


def test_only_one_form_can_be_asked_for():
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    with pytest.raises(ApiError, match="both") as caught:
        check_body(ChatCompletionBody, chat(**both))
    assert caught.value.status == 400
    assert asked(**{**both, "response_format": {"type": "text"}}) == StructuredOutput("regex", "a")
