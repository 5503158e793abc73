"""The OpenAPI document says what is true: of routes, and of the bodies that they take."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

from gateway.app import make_app
from gateway.openapi.document import make_document
from gateway.openapi.operation import Access
from gateway.openapi.operations import OPERATIONS
from gateway.services import make_services
from shared.config import HeadraceConfig, parse_config
from shared.identifiers import fresh_gateway_id
from shared.telemetry import start_tracing
from tests.odd_values import ODD_VALUES
from tests.request_bodies import EXAMPLES, Place, places_in, with_value_at

DOCUMENT = make_document(OPERATIONS)


def app_of(config: HeadraceConfig) -> web.Application:
    services = make_services(
        config,
        redis_url="redis://127.0.0.1:1",  # nothing is asked of it
        key_pepper=b"",
        admin_token="",
        gateway_id=fresh_gateway_id(),
        tracing=start_tracing("test", "test"),
    )
    return make_app(services)


async def test_every_route_is_in_the_document_and_nothing_else() -> None:
    app = app_of(parse_config({"models": [{"name": "m", "source": "fake:"}]}))
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # which aiohttp adds to each GET
    }
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == routes


def operations() -> Iterator[dict[str, Any]]:
    for methods in DOCUMENT["paths"].values():
        yield from methods.values()


def references_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references_in(inner)


def test_the_document_is_json_whose_references_and_schemas_hold() -> None:
    assert json.loads(json.dumps(DOCUMENT, allow_nan=False)) == DOCUMENT
    for reference in references_in(DOCUMENT):
        target: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    ids = [operation["operationId"] for operation in operations()]
    assert len(set(ids)) == len(ids)
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    assert all(set(operation["tags"]) <= tags for operation in operations())


def test_what_needs_a_key_says_so_and_can_be_refused() -> None:
    for operation in OPERATIONS:
        document = DOCUMENT["paths"][operation.path][operation.method.lower()]
        assert bool(document["security"]) == (operation.access != Access.OPEN)
        assert ("401" in document["responses"]) == (operation.access != Access.OPEN)
        assert ("requestBody" in document) == (operation.body is not None)


# ---------------------------------------------------------------------------------------- bodies


METHODS = {operation.path: operation.method.lower() for operation in OPERATIONS if operation.body is not None}


def validator_of(path: str, document: dict[str, Any] = DOCUMENT) -> Draft202012Validator:
    """Of what is sent there."""
    content = document["paths"][path][METHODS[path]]["requestBody"]["content"]
    return Draft202012Validator(
        {**content["application/json"]["schema"], "components": document["components"]}
    )


BODIES = {operation.path: operation.body for operation in OPERATIONS if operation.body is not None}


def as_read(document: Any) -> Any:
    """As the gateway's reader of JSON hands it to the check. Raises ValueError for what never gets so far."""
    return msgspec.json.decode(json.dumps(document))


def holds_odd_number(value: Any) -> bool:
    """JSON Schema calls 1.0 an integer, which readers of JSON call a float, and knows no largest number."""
    if isinstance(value, float):
        return value.is_integer()
    if isinstance(value, int):
        return abs(value) > sys.float_info.max
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and any(map(holds_odd_number, value))


def is_refused_for_more_than_form(error: ValidationError) -> bool:
    """By a check of our own, which looks at several fields or at what a text means."""
    return any(each["type"] == "value_error" for each in error.errors(include_url=False))


def test_there_are_examples_of_every_body_and_its_schema_allows_them() -> None:
    assert set(EXAMPLES) == set(BODIES)
    for path, examples in EXAMPLES.items():
        for example in examples:
            validator_of(path).validate(example)
            TypeAdapter(BODIES[path]).validate_python(example)


def odd_documents(path: str) -> Iterator[tuple[Place, str, Any]]:
    """The examples with each value in turn replaced by each odd one, and every field that they lack."""
    lacking = [(name,) for name in sorted(fields_of(BODIES[path]))]
    tried: set[Place] = set()
    for example in EXAMPLES[path]:
        for place in [*places_in(example), *lacking]:
            if place not in tried:
                tried.add(place)
                for label, value in ODD_VALUES.items():
                    yield place, label, with_value_at(example, place, value)


def fields_of(body: Any) -> set[str]:
    kinds = [body] if isinstance(body, type) else typing.get_args(body)
    return {info.alias or name for kind in kinds for name, info in kind.model_fields.items()}


@pytest.mark.parametrize("path", {body: path for path, body in BODIES.items()}.values())
def test_the_schema_of_a_body_allows_what_its_check_accepts(path: str) -> None:
    validator = jsonschema_rs.Draft202012Validator(validator_of(path).schema)
    check = TypeAdapter(BODIES[path]).validate_python
    differences: dict[Place, list[str]] = {}
    for place, label, document in odd_documents(path):
        try:
            read = as_read(document)
        except ValueError:
            continue
        if holds_odd_number(read):
            continue
        is_allowed = validator.is_valid(read)
        try:
            check(read)
        except ValidationError as error:
            if is_allowed and not is_refused_for_more_than_form(error):
                reason = error.errors()[0]["msg"]
                differences.setdefault(place, []).append(f"{label}: allowed, but refused: {reason}")
        else:
            if not is_allowed:
                differences.setdefault(place, []).append(f"{label}: not allowed, but accepted")
    assert not differences


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_not_listed_is_allowed_only_where_it_is_configured(path: str) -> None:
    document = EXAMPLES[path][0] | {"frobnicate": 1}
    assert not validator_of(path).is_valid(document)
    lenient = make_document(OPERATIONS, takes_unknown_fields=True)
    assert validator_of(path, lenient).is_valid(document) == (not path.startswith("/admin"))


def test_an_answer_s_fields_stay_closed_where_unknown_ones_of_bodies_are_taken() -> None:
    schemas = make_document(OPERATIONS, takes_unknown_fields=True)["components"]["schemas"]
    assert schemas["ErrorAnswer"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["ChatCompletionBody"]
    assert "additionalProperties" not in schemas["StreamOptions"]
