"""Answers that keep to a form."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable, check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_new": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["colour", "count", "is_new", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


def finished(answer: Answer, feature: str) -> str:
    """The content of an answer that was not cut."""
    choice = answer.ok(feature).json["choices"][0]
    if choice["finish_reason"] == "length":
        raise NotApplicable("the model did not come to an end in time")
    return str(choice["message"]["content"])


@row
async def json_object_is_an_object(server: Server) -> None:
    """response_format json_object gives a JSON object."""
    messages = [{"role": "user", "content": 'Answer with the JSON object {"a": 1} and nothing else.'}]
    answer = await server.chat(messages=messages, max_tokens=400, response_format={"type": "json_object"})
    check(isinstance(json.loads(finished(answer, "response_format")), dict), "it is no object")


@row
async def a_schema_is_kept(server: Server) -> None:
    """Answers validate against their schema at temperature 1, whatever the seed."""
    if importlib.util.find_spec("jsonschema") is None:
        raise NotApplicable("jsonschema is not installed here")
    import jsonschema  # type: ignore[import-untyped]  # optional: most servers are tested without

    for seed in (1, 2, 3):
        answer = await server.chat(max_tokens=400, response_format=FORMAT, temperature=1, seed=seed)
        try:
            jsonschema.validate(json.loads(finished(answer, "response_format")), SCHEMA)
        except jsonschema.ValidationError as error:
            check(False, f"seed {seed}: {error.message}")


@row
async def a_stream_keeps_it_too(server: Server) -> None:
    """The pieces of a constrained stream are the whole constrained answer."""
    whole = finished(await server.chat(max_tokens=400, response_format=FORMAT), "response_format")
    stream = (await server.chat_stream(max_tokens=400, response_format=FORMAT)).ok()
    check_equal(stream.texts[0], whole, "the streamed text")


@row
async def a_schema_that_is_none_is_refused(server: Server) -> None:
    """A schema with a type that does not exist is a 400 of response_format."""
    for schema in ({"type": "no-such-type"}, {"type": "object", "properties": 3}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        (await server.chat(response_format=form)).refused(400, param="response_format")


@row
async def a_format_that_is_none_is_refused(server: Server) -> None:
    """Unknown types, and json_schema without a schema, are a 400 of response_format."""
    for form in ({"type": "yaml"}, {"type": "json_schema"}, "json"):
        (await server.chat(response_format=form)).refused(400, param="response_format")


@row
async def text_is_no_form(server: Server) -> None:
    """response_format text changes nothing."""
    plain = (await server.chat()).ok().json["choices"][0]["message"]
    asked = (
        (await server.chat(response_format={"type": "text"}))
        .ok("response_format")
        .json["choices"][0]["message"]
    )
    check_equal(asked, plain, "the message")


async def _constrained(server: Server, form: dict[str, Any]) -> str:
    return finished(await server.chat(max_tokens=200, structured_outputs=form), "structured_outputs")


@row
async def a_regex_is_matched(server: Server) -> None:
    """vLLM's structured_outputs.regex."""
    text = await _constrained(server, {"regex": "[a-c]{3}-[0-9]{2}"})
    check(re.fullmatch("[a-c]{3}-[0-9]{2}", text), f"{text!r} does not match")


@row
async def a_choice_is_made(server: Server) -> None:
    """vLLM's structured_outputs.choice."""
    text = await _constrained(server, {"choice": ["yes", "no", "日本"]})
    check(text in ("yes", "no", "日本"), f"{text!r} is none of the choices")
