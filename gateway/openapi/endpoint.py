"""`GET /openapi.json`."""

from __future__ import annotations

import hashlib

import msgspec
from aiohttp import ETag, web

from gateway.openapi.document import make_document
from gateway.openapi.operations import OPERATIONS
from gateway.services import Services


class OpenApiEndpoint:
    """There are two documents, since a gateway can be told to take fields that it does not know. The one in
    force is made at the start: that takes some 25 ms."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._made: dict[bool, tuple[bytes, str]] = {}
        self._document()

    async def handle(self, request: web.Request) -> web.Response:
        body, tag = self._document()
        if any(each.value in (tag, "*") for each in request.if_none_match or ()):
            response = web.Response(status=304)
        else:
            response = web.Response(body=body, content_type="application/json")
        response.etag = ETag(tag)
        return response

    def _document(self) -> tuple[bytes, str]:
        """And its tag."""
        is_lenient = self._services.policy.current.options.unknown_fields == "ignore"
        if is_lenient not in self._made:
            body = msgspec.json.encode(make_document(OPERATIONS, takes_unknown_fields=is_lenient))
            self._made[is_lenient] = body, hashlib.sha256(body).hexdigest()[:16]
        return self._made[is_lenient]
