"""A small HTTP client of a stack, for commands: readiness, models, and streamed answers.

On http.client, which knows no proxies: the stack is on loopback or where the user said it is.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 300.0


class GatewayError(Exception):
    """The gateway could not be reached, or refused. The message is fit to be shown."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # None: there was no answer


_WRITER = "generate"  # the runner of a model that writes, as opposed to one that makes embeddings


def first_writer(models: Mapping[str, str]) -> str | None:
    """Of models and their runners, the first that can be talked to."""
    return next((name for name, runner in models.items() if runner == _WRITER), None)


class GatewayClient:
    """One stack and one key. Each call makes its own connection."""

    def __init__(self, url: str, api_key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GatewayError(f"{url!r} is not an http:// or https:// address")
        self._parts = parts
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    @property
    def port(self) -> int:
        return self._parts.port or (443 if self._parts.scheme == "https" else 80)

    def is_ready(self) -> bool:
        """Whether every configured model has a ready engine."""
        connection = self._connection(CONNECT_TIMEOUT_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):  # not listening yet, or just restarting
            return False
        finally:
            connection.close()

    def models(self) -> dict[str, str]:
        """Names that this key may use as `model`, and the runner of each. Raises GatewayError."""
        connection = self._connection(CONNECT_TIMEOUT_S)
        try:
            response = self._send(connection, "GET", "/v1/models", None)
            entries = json.loads(response.read())["data"]
            return {entry["id"]: entry.get("runner", _WRITER) for entry in entries}
        finally:
            connection.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], str | None]:
        """The JSON of an answer and its entity tag. Raises GatewayError."""
        connection = self._connection(CONNECT_TIMEOUT_S if timeout_s is None else timeout_s)
        try:
            response = self._send(connection, method, path, body, headers)
            return json.loads(response.read()), response.headers.get("ETag")
        except (ValueError, http.client.HTTPException, OSError) as error:
            raise GatewayError(f"{self._parts.geturl()} does not answer as a gateway: {error}") from error
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer. Raises GatewayError. Closing the iterator ends the request."""
        connection = self._connection(ANSWER_TIMEOUT_S)
        try:
            response = self._send(connection, "POST", path, {**body, "stream": True})
            yield from _events(response)
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(f"the connection to the gateway broke: {error}") from error
        finally:
            connection.close()

    def time_to_first_token_s(self, model: str) -> float:
        """Of one tiny completion, from sending it to its first event. Raises GatewayError."""
        started_at = time.perf_counter()
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        events = self.stream("/v1/completions", body)
        if next(events, None) is None:
            raise GatewayError("the gateway sent an empty answer")
        elapsed_s = time.perf_counter() - started_at
        for _ in events:  # to the end, so that it does not count as a client that left
            pass
        return elapsed_s

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None, "checked by the constructor"
        return kind(self._parts.hostname, self._parts.port, timeout=timeout_s)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, path, content, {**self._headers, **(headers or {})})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(f"cannot reach the gateway at {self._parts.geturl()}: {error}") from error
        if response.status not in (http.HTTPStatus.OK, http.HTTPStatus.CREATED):
            raise GatewayError(
                f"the gateway answered {response.status}: {_message(response.read())}", response.status
            )
        return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events up to `[DONE]`. A stream that ends without it was cut."""
    for raw in response:
        field, _, value = raw.decode("utf-8").rstrip("\r\n").partition(": ")
        if field != "data":
            continue
        if value == "[DONE]":
            return
        event = json.loads(value)
        if "error" in event:
            raise GatewayError(str(event["error"].get("message", event["error"])))
        yield event
    raise GatewayError("the answer ended early")


def _message(body: bytes) -> str:
    """Of an error in the OpenAI shape, else the start of whatever came."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
