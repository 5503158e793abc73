"""From operations to the document, in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1)."""

from __future__ import annotations

import http
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from gateway.anthropic.dialect import OVERLOADED
from gateway.openapi.operation import Access, Operation

_JSON = "application/json"
_SECURITY: dict[Access, list[dict[str, list[str]]]] = {
    Access.OPEN: [],
    Access.KEY: [{"key": []}, {"keyHeader": []}],
    Access.ADMIN: [{"adminToken": []}],
}
_SECURITY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "keyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
    "adminToken": {"type": "http", "scheme": "bearer", "description": "The operator's token."},
}
_HEADERS = {
    "RequestId": {
        "description": "The client's own x-request-id if it is fit to be echoed, else a fresh one.",
        "required": True,
        "schema": {"type": "string"},
    },
    "RetryAfter": {
        "description": "Seconds after which trying again can help.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
}
_RETRYABLE = (408, 429, 502, 503, 504, OVERLOADED)
_EVENTS = (
    "With `stream`: server-sent events, the data of each being JSON. A stream that breaks off ends with one "
    "event that holds the error."
)
Key = tuple[str, int]  # an operation, and the status of its answer; 0: its body, -1: its errors


class _Schemas(GenerateJsonSchema):
    """Without a title for each field: it would only repeat the name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def make_document(operations: Iterable[Operation], *, takes_unknown_fields: bool = False) -> dict[str, Any]:
    """`takes_unknown_fields`: bodies may hold fields that are not listed; so a gateway can be configured."""
    operations = tuple(operations)
    schemas, components = _schemas_of(operations)
    if takes_unknown_fields:
        bodies = [
            schemas[operation.operation_id, 0]
            for operation in operations
            if operation.body is not None and operation.access == Access.KEY
        ]
        _open(bodies, components)
    paths: dict[str, Any] = {}
    for operation in operations:
        described = _operation(operation, schemas)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
        for number, alias in enumerate(operation.aliases, start=2):
            name = f"{operation.operation_id}{number}"
            paths.setdefault(alias, {})[operation.method.lower()] = {**described, "operationId": name}
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "Headrace",
            "version": metadata.version("headrace"),
            "description": "Language models behind an OpenAI-style API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in operations)],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": _HEADERS,
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def _schemas_of(operations: Iterable[Operation]) -> tuple[dict[Key, Any], dict[str, Any]]:
    """The schema of each body, answer and error, and those that they refer to."""
    inputs: list[tuple[Key, JsonSchemaMode, TypeAdapter[Any]]] = []
    for operation in operations:
        name = operation.operation_id
        if operation.body is not None:
            inputs.append(((name, 0), "validation", TypeAdapter(operation.body)))
        for status, answer in operation.answers.items():
            inputs.append(((name, status), "validation", TypeAdapter(answer)))
        if operation.errors:
            inputs.append(((name, -1), "validation", TypeAdapter(operation.error)))
    by_key, rest = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_Schemas
    )
    return {key: schema for (key, _), schema in by_key.items()}, rest.get("$defs", {})


def _operation(operation: Operation, schemas: dict[Key, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "operationId": operation.operation_id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "security": _SECURITY[operation.access],
    }
    text = {"type": "string", "minLength": 1}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": description, "schema": text}
        for name, description in operation.parameters.items()
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if parameters:
        document["parameters"] = parameters
    if operation.body is not None:
        document["requestBody"] = {
            "required": not operation.may_lack_body,
            "content": {_JSON: {"schema": schemas[operation.operation_id, 0]}},
        }
    document["responses"] = _responses(operation, schemas)
    return document


def _responses(operation: Operation, schemas: dict[Key, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in operation.texts:
        responses[str(status)] = _response(operation, status, {"text/plain": {"schema": {"type": "string"}}})
    for status in operation.answers:
        content: dict[str, Any] = {_JSON: {"schema": schemas[operation.operation_id, status]}}
        response = responses[str(status)] = _response(operation, status, content)
        if operation.streams:
            response["description"] += f". {_EVENTS}"
            content["text/event-stream"] = {}
    for status in operation.errors:
        response = _response(operation, status, {_JSON: {"schema": schemas[operation.operation_id, -1]}})
        if status in _RETRYABLE:
            response["headers"]["Retry-After"] = {"$ref": "#/components/headers/RetryAfter"}
        responses[str(status)] = response
    return dict(sorted(responses.items()))


def _response(operation: Operation, status: int, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": "Overloaded" if status == OVERLOADED else http.HTTPStatus(status).phrase,
        "headers": {name: {"$ref": "#/components/headers/RequestId"} for name in operation.id_headers},
        "content": content,
    }


def _open(schemas: Iterable[Any], components: dict[str, Any]) -> None:
    """Lets these schemas, and all that they refer to, have fields that are not listed."""
    pending: list[Any] = list(schemas)
    opened: set[str] = set()
    while pending:
        schema = pending.pop()
        if isinstance(schema, list):
            pending += schema
        elif isinstance(schema, dict):
            if schema.get("additionalProperties") is False:
                del schema["additionalProperties"]
            name = str(schema.get("$ref", "")).rpartition("/")[2]
            if name and name not in opened:
                opened.add(name)
                pending.append(components[name])
            pending += schema.values()
