"""The server under test, and how rows talk to it."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from loadtest.conformance.answer import Answer, StreamedAnswer
from loadtest.conformance.check import NotApplicable
from loadtest.conformance.connection import Connection
from shared.errors import UserError

QUESTION = "Count from one to one hundred in words, without stopping."
ANTHROPIC_VERSION = "2023-06-01"
DEFAULT_ORIGIN = "http://localhost:3000"
REACH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """What the user says of the server, completed by what it says of itself."""

    url: str  # without /v1
    key: str | None
    model: str
    embedding_model: str | None = None  # None: none that is known
    anthropic_key: str | None = None  # for /v1/messages; None: `key`
    max_model_len: int | None = None
    origin: str = DEFAULT_ORIGIN  # of a web page that is to be let in (CORS)
    node_modules: Path | None = None  # with OpenAI's JavaScript client; None: wherever it is found


class Server:
    """Requests of rows. Each has a connection of its own, so that no row can spoil the next one's."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self.target = target
        self._session = session

    @property
    def model(self) -> str:
        return self.target.model

    @property
    def embedding_model(self) -> str:
        return self.target.embedding_model or self.target.model

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | None = "",
    ) -> Answer:
        """`body`: bytes as they are, or a document for JSON. `path`: as it is. `key`: "": the right one."""
        return (await self._exchange(method, path, body, headers, key)).answer

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.send("GET", path, **options)

    async def post(self, path: str, body: object, **options: Any) -> Answer:
        return await self.send("POST", path, body, **options)

    async def stream(
        self, path: str, body: dict[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> StreamedAnswer:
        return await self._exchange("POST", path, {**body, "stream": True}, headers, "")

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTION}]
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
            "seed": 1,
        } | fields

    async def chat(self, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", self.chat_body(**fields))

    async def chat_stream(self, **fields: Any) -> StreamedAnswer:
        return await self.stream("/v1/chat/completions", self.chat_body(**fields))

    def completion_body(self, **fields: Any) -> dict[str, Any]:
        base = {
            "model": self.model,
            "prompt": "Once upon a time",
            "max_tokens": 24,
            "temperature": 0,
            "seed": 1,
        }
        return base | fields

    async def complete(self, **fields: Any) -> Answer:
        return await self.post("/v1/completions", self.completion_body(**fields))

    async def complete_stream(self, **fields: Any) -> StreamedAnswer:
        return await self.stream("/v1/completions", self.completion_body(**fields))

    def message_body(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTION}]
        return {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0} | fields

    @property
    def anthropic_headers(self) -> dict[str, str]:
        key = self.target.anthropic_key or self.target.key
        return {"anthropic-version": ANTHROPIC_VERSION, **({"x-api-key": key} if key else {})}

    async def message(self, path: str = "/v1/messages", **fields: Any) -> Answer:
        body = self.message_body(**fields)
        return await self.post(path, body, headers=self.anthropic_headers, key=None)

    async def message_stream(self, **fields: Any) -> StreamedAnswer:
        body = {**self.message_body(**fields), "stream": True}
        return await self._exchange("POST", "/v1/messages", body, self.anthropic_headers, None)

    @asynccontextmanager
    async def connection(self, *, receive_buffer_bytes: int | None = None) -> AsyncIterator[Connection]:
        """A bare socket, for what an HTTP client would not do."""
        parts = urlsplit(self.target.url)
        is_tls = parts.scheme == "https"
        connection = await Connection.open(
            parts.hostname or "",
            parts.port or (443 if is_tls else 80),
            ssl.create_default_context() if is_tls else None,
            receive_buffer_bytes,
        )
        try:
            yield connection
        finally:
            connection.close()

    def raw_request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        version: str = "HTTP/1.1",
    ) -> bytes:
        """The bytes of a request. `headers` replace those of the same name; Content-Length is the body's."""
        parts = urlsplit(self.target.url)
        all_headers = {"Host": parts.netloc, **self._authorization("")}
        if body or method == "POST":
            all_headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        all_headers |= headers or {}
        lines = [f"{method} {parts.path}{path} {version}"]
        lines += [f"{name}: {value}" for name, value in all_headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def raw_chat(self, **fields: Any) -> bytes:
        """The body of a chat request as bytes."""
        return json.dumps(self.chat_body(**fields)).encode()

    async def needs_keys(self) -> None:
        """Raises NotApplicable where the server answers everybody."""
        if (await self.get("/v1/models", key=None)).status == 200:
            raise NotApplicable("the server asks for no key")

    def _authorization(self, key: str | None) -> dict[str, str]:
        key = self.target.key if key == "" else key
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def _exchange(
        self, method: str, path: str, body: object, headers: Mapping[str, str] | None, key: str | None
    ) -> StreamedAnswer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {
            **self._authorization(key),
            **({"Content-Type": "application/json"} if data is not None else {}),
        }
        sent |= headers or {}
        started = time.monotonic()
        first_byte_s = None
        pieces = []
        url = URL(self.target.url + path, encoded=True)
        async with self._session.request(
            method, url, data=data, headers=sent, allow_redirects=False, skip_auto_headers=("Content-Type",)
        ) as response:
            async for piece in response.content.iter_any():
                first_byte_s = first_byte_s or time.monotonic() - started
                pieces.append(piece)
            lowered = {name.lower(): value for name, value in response.headers.items()}
            answer = Answer(path, response.status, lowered, b"".join(pieces))
        last_byte_s = time.monotonic() - started
        return StreamedAnswer(answer, first_byte_s or last_byte_s, last_byte_s)


@asynccontextmanager
async def open_server(
    url: str,
    *,
    key: str | None,
    model: str | None,
    embedding_model: str | None = None,
    anthropic_key: str | None = None,
    origin: str = DEFAULT_ORIGIN,
    node_modules: Path | None = None,
) -> AsyncIterator[Server]:
    """The server behind a URL (with or without /v1), whose first model is tested unless one is named.

    Raises UserError where there is none, or where it does not let us in.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(f"{url!r} is no http:// or https:// URL", "URL")
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=None)  # rows have a limit of their own
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=False) as session:
        bare = Server(Target(url, key, model or ""), session)
        listed = await _listed_models(bare)
        if model is None:
            names = [entry["id"] for entry in listed if entry.get("runner") != "pooling"]
            if not names:
                raise UserError("the server lists no model; name one with --model", "--model")
            model = names[0]
        if embedding_model is None:
            pooling = [entry["id"] for entry in listed if entry.get("runner") == "pooling"]
            embedding_model = pooling[0] if pooling else None
        lengths = [entry.get("max_model_len") for entry in listed if entry["id"] == model]
        length = lengths[0] if lengths and isinstance(lengths[0], int) else None
        target = Target(
            url, key, model, embedding_model, anthropic_key, length, origin=origin, node_modules=node_modules
        )
        yield Server(target, session)


async def _listed_models(server: Server) -> list[dict[str, Any]]:
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            answer = await server.get("/v1/models")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {REACH_TIMEOUT_S:g} s"
        raise UserError(f"{server.target.url} cannot be reached: {reason}", "URL") from error
    if answer.status in (401, 403):
        raise UserError(f"the server refuses the key: {answer.says}", "--key")
    try:
        entries = json.loads(answer.body)["data"]
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    except (ValueError, KeyError, TypeError):
        return []  # a row will say so
