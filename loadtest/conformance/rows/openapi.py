"""`GET /openapi.json`: the server's description of itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
CHAT = "/v1/chat/completions"


async def document_of(server: Server) -> dict[str, Any]:
    document: dict[str, Any] = (await server.get("/openapi.json")).ok().json
    return document


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield method, path, item[method]


def references_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references_in(inner)


def leads_somewhere(document: Any, reference: str) -> bool:
    """Only references within the document do."""
    begin, *parts = reference.split("/")
    if begin != "#":
        return False
    for part in parts:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(document, dict) or part not in document:
            return False
        document = document[part]
    return True


@row
async def the_document_is_openapi_3(server: Server) -> None:
    """openapi 3.x, with a title and a version."""
    document = await document_of(server)
    check(str(document["openapi"]).startswith("3."), f"openapi is {document['openapi']!r}")
    check(document["info"]["title"] and document["info"]["version"], f"info is {document['info']}")


@row
async def it_needs_no_key(server: Server) -> None:
    """Whoever writes a client reads it before he has a key."""
    await document_of(server)
    (await server.get("/openapi.json", key=None)).ok()


@row
async def it_has_the_routes(server: Server) -> None:
    """The routes that every such server has are described."""
    described = {(method, path) for method, path, _ in operations_of(await document_of(server))}
    for route in (("post", CHAT), ("get", "/v1/models")):
        check_in(route, described, "the route")


@row
async def references_lead_somewhere(server: Server) -> None:
    """Every $ref is within the document, and there."""
    document = await document_of(server)
    lost = sorted({each for each in references_in(document) if not leads_somewhere(document, each)})
    check_equal(lost, [], "the list of lost references")


@row
async def operations_have_names_of_their_own(server: Server) -> None:
    """operationIds, of which generators make the names of functions, differ."""
    names = [operation.get("operationId") for _, _, operation in operations_of(await document_of(server))]
    given = [name for name in names if name is not None]
    if not given:
        raise NotApplicable("operations have no operationId")
    check_equal(sorted(given), sorted(set(given)), "the list of names")


@row
async def bodies_are_what_it_says(server: Server) -> None:
    """The schema of a chat's body holds for one that is taken, and not for some that are refused."""
    if importlib.util.find_spec("jsonschema") is None:
        raise NotApplicable("jsonschema is not installed here")
    import jsonschema  # type: ignore[import-untyped]  # optional: most servers are tested without

    document = await document_of(server)
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**document, **schema})
    for fields, status in (({}, 200), ({"temperature": "hot"}, 400), ({"messages": None}, 400)):
        body = server.chat_body(**fields)
        check_equal((await server.post(CHAT, body)).status, status, f"the status of {fields}")
        check_equal(validator.is_valid(body), status == 200, f"whether the schema holds for {fields}")
