"""A plain HTTP client for tests that look at statuses, headers and raw bytes."""

from __future__ import annotations

import gzip
import http.client
import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstd.compress,
}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error


def send(
    url: str,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | list[Any] | None = None,
    *,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 30.0,
) -> Answer:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read())
    finally:
        connection.close()


class KeptConnection:
    """One connection that stays open: opening thousands would be most of the time."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)

    def send(self, path: str, body: str | bytes, method: str = "POST") -> tuple[int, bytes]:
        """Status and content. Raises TimeoutError."""
        data = body.encode() if isinstance(body, str) else body
        self._connection.request(method, path, data, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        self._connection.close()
