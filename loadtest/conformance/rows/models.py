"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from loadtest.conformance.check import check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.server import Server


@row
async def list_has_the_shape(server: Server) -> None:
    """The list is an object `list` of objects `model` with id, created and owned_by."""
    document = (await server.get("/v1/models")).ok().json
    check_equal(document["object"], "list", "object")
    for entry in document["data"]:
        check_equal(entry["object"], "model", "object of an entry")
        check(isinstance(entry["created"], int), f"created is {entry['created']!r}")
        check(isinstance(entry["owned_by"], str), f"owned_by is {entry['owned_by']!r}")


@row
async def list_names_the_model(server: Server) -> None:
    """The model that is tested is listed."""
    document = (await server.get("/v1/models")).ok().json
    check_in(server.model, [entry["id"] for entry in document["data"]], "the model")


async def found(server: Server, path: str) -> dict[str, Any]:
    document: dict[str, Any] = (await server.get(f"/v1/models/{path}")).ok().json
    return document


@row
async def model_is_found_by_name(server: Server) -> None:
    """A model can be asked for by its id, slashes as they are."""
    document = await found(server, quote(server.model))
    check_equal((document["object"], document["id"]), ("model", server.model), "object and id")


@row
async def model_is_found_by_an_encoded_name(server: Server) -> None:
    """Clients may percent-encode an id, slashes included."""
    await found(server, quote(server.model))  # the route is there
    encoded = "".join(f"%{byte:02X}" for byte in server.model.encode())
    answer = await server.get(f"/v1/models/{encoded}")
    check_equal(answer.status, 200, "status")
    check_equal(answer.json["id"], server.model, "id")


@row
async def unknown_ids_with_slashes_are_not_found(server: Server) -> None:
    """A name that there is not is a 404 of the model's, with slashes plain or encoded."""
    await found(server, quote(server.model))  # the route is there
    for path in ("no/such", "no%2Fsuch"):
        (await server.get(f"/v1/models/{path}")).refused(404, code="model_not_found")


@row
async def list_needs_a_key(server: Server) -> None:
    """Names of models are for those with a key only."""
    await server.needs_keys()
    (await server.get("/v1/models", key="wrong-key")).refused(401)
