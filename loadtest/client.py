"""One streaming request to an OpenAI-compatible server, and the times of all that comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from loadtest.event_stream import EventStream
from loadtest.options import Backend
from loadtest.request_record import FailureKind, RequestRecord
from loadtest.workload import Prompt

CONNECT_TIMEOUT_S = 30.0
READ_BUFFER_BYTES = 2**20
MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    backend: Backend
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # hold the key
    sampling: Mapping[str, Any] = field(default_factory=dict)  # sent with every request
    ignore_eos: bool = False
    timeout_s: float = 3600.0


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class StreamEvent(msgspec.Struct):
    """The part of a completion chunk that we read; servers may send more."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class RequestFailure(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class OpenAIClient:
    """Owns the connections. As many are opened as requests run; they are kept for later requests.

    Not limited by aiohttp's default of 100 connections, and deaf to proxy variables: both would
    become part of the measurement.
    """

    def __init__(self, target: Target, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._target = target
        self._clock_ns = clock_ns
        self._decoder = msgspec.json.Decoder(StreamEvent)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = open_session(self._target.headers, self._target.timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, prompt: Prompt, record: RequestRecord) -> None:
        """Makes the request and fills the record, whatever happens. Raises only on our own bugs."""
        body = self.body_of(prompt)
        record.num_prompt_tokens = prompt.num_tokens
        text: list[str] = []
        record.t_sent_ns = self._clock_ns()
        try:
            await self._exchange(body, record, text)
        except RequestFailure as failure:
            record.failure, record.error = failure.kind, str(failure)
        except aiohttp.ServerTimeoutError as error:  # of the connection; it is a TimeoutError too
            record.failure, record.error = "connection", f"{type(error).__name__}: {error}"
        except TimeoutError:
            record.failure, record.error = "timeout", f"no end after {self._target.timeout_s:g} s"
        except aiohttp.ClientPayloadError as error:
            record.failure, record.error = "cut", f"connection lost inside the answer: {error}"
        except (aiohttp.ClientError, OSError) as error:
            record.failure, record.error = "connection", f"{type(error).__name__}: {error}"
        record.t_end_ns = self._clock_ns()
        record.text = "".join(text)

    def body_of(self, prompt: Prompt) -> bytes:
        body: dict[str, Any] = {
            "model": self._target.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": prompt.num_output_tokens,
            **self._target.sampling,
        }
        if self._target.backend == "openai-chat":
            body["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            body["prompt"] = prompt.content
        if self._target.ignore_eos:
            body["ignore_eos"] = True
            body["min_tokens"] = prompt.num_output_tokens
        return msgspec.json.encode(body)

    async def _exchange(self, body: bytes, record: RequestRecord, text: list[str]) -> None:
        assert self._session is not None, "the client is used outside its `async with`"
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._target.url, data=body, headers=headers) as response:
            record.t_headers_ns = self._clock_ns()
            record.http_status = response.status
            record.server_request_id = response.headers.get("x-request-id")
            if response.status != 200:
                reason = error_message(await response.read()) or response.reason or ""
                raise RequestFailure("http_status", f"HTTP {response.status}: {reason}")
            stream = EventStream()
            is_done = False
            async for piece in response.content.iter_any():
                now_ns = self._clock_ns()
                for event in stream.feed(piece):
                    if event == b"[DONE]":
                        is_done = True
                    else:
                        self._take(event, now_ns, record, text)
        check_complete(record, is_done)

    def _take(self, data: bytes, now_ns: int, record: RequestRecord, text: list[str]) -> None:
        if record.t_first_event_ns is None:
            record.t_first_event_ns = now_ns
        try:
            event = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestFailure("bad_stream", f"not a completion chunk: {error}") from error
        if event.error is not None:
            raise RequestFailure("error_event", error_message(data) or "error event without a message")
        if event.usage is not None:
            take_usage(event.usage, record)
        if not event.choices:
            return
        record.chunk_times_ns.append(now_ns)
        choice = event.choices[0]
        if choice.finish_reason is not None:
            record.finish_reason = choice.finish_reason
        content, is_empty = content_of(choice)
        text.append(content)
        if not is_empty and record.t_first_token_ns is None:
            record.t_first_token_ns = now_ns


def open_session(headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=60, ttl_dns_cache=300),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        read_bufsize=READ_BUFFER_BYTES,
        trust_env=False,
    )


async def first_model(models_url: str, headers: Mapping[str, str]) -> str:
    """The first model that the server lists. Raises LookupError with what went wrong."""
    try:
        async with (
            open_session(headers, CONNECT_TIMEOUT_S) as session,
            session.get(models_url) as response,
        ):
            body = await response.read()
    except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError too
        raise LookupError(f"cannot reach {models_url}: {error}") from error
    if response.status != 200:
        raise LookupError(f"{models_url} answers HTTP {response.status}: {error_message(body)}")
    try:
        models = msgspec.json.decode(body)["data"]
        return str(models[0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise LookupError(f"{models_url} lists no model") from error


def check_complete(record: RequestRecord, is_done: bool) -> None:
    """A 200 alone is no success: the answer must have tokens, a finish reason and the end mark."""
    if not is_done:
        raise RequestFailure("cut", "the stream ended without [DONE]")
    if record.num_output_tokens == 0 or not record.chunk_times_ns:
        raise RequestFailure("empty", "the answer has no tokens")
    if record.finish_reason is None:
        raise RequestFailure("cut", "the stream ended without a finish_reason")


def take_usage(usage: Usage, record: RequestRecord) -> None:
    if usage.completion_tokens is not None:
        record.num_output_tokens = usage.completion_tokens
    if usage.prompt_tokens is not None:
        record.num_prompt_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens


def content_of(choice: Choice) -> tuple[str, bool]:
    """The text of a chunk, and whether it holds nothing: no text, no reasoning, no tool call."""
    if choice.delta is None:
        return choice.text or "", not choice.text
    delta = choice.delta
    other = delta.reasoning or delta.reasoning_content or delta.tool_calls
    return delta.content or "", not (delta.content or other)


def error_message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, else the beginning of the text."""
    try:
        error = msgspec.json.decode(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        message = body.decode("utf-8", "replace")
    return str(message)[:MAX_ERROR_CHARACTERS]
