"""Faults of the server's description of itself."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import CHAT, Planted, at, refuses, tells

PATH = "/openapi.json"


def without_prefix(document: dict[str, Any]) -> None:
    document["paths"] = {path.removeprefix("/v1"): item for path, item in document["paths"].items()}


def a_schema_is_lost(document: dict[str, Any]) -> None:
    document["components"]["schemas"]["Another"] = {"$ref": "#/components/schemas/Lost"}


def names_of_tags(document: dict[str, Any]) -> None:
    for item in document["paths"].values():
        for operation in item.values():
            operation["operationId"] = operation["tags"][0]


def anything_goes(document: dict[str, Any]) -> None:
    document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"] = {
        "type": "object"
    }


FAULTS: list[Planted] = [
    tells(
        "a document of OpenAPI 2",
        at(PATH),
        lambda document: document.update(openapi="2.0"),
        "openapi.the-document-is-openapi-3",
    ),
    refuses(
        "to describe itself without a key",
        lambda asked: at(PATH)(asked) and b"authorization" not in asked.head,
        "openapi.it-needs-no-key",
        status=401,
    ),
    tells(
        "paths have lost their prefix",
        at(PATH),
        without_prefix,
        "openapi.it-has-the-routes",
        "openapi.bodies-are-what-it-says",
    ),
    tells("a schema is lost", at(PATH), a_schema_is_lost, "openapi.references-lead-somewhere"),
    tells(
        "operations are named by their tags",
        at(PATH),
        names_of_tags,
        "openapi.operations-have-names-of-their-own",
    ),
    tells("anything goes", at(PATH), anything_goes, "openapi.bodies-are-what-it-says"),
]
