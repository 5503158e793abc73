"""One request to an OpenAI-compatible server, and the times of all that comes back."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import msgspec

from loadtest.connection_pool import ConnectionPool
from loadtest.datasets.prompt import Prompt
from loadtest.event_stream import EventStream
from loadtest.http_connection import ProtocolError
from loadtest.options import Backend
from loadtest.request_record import FailureKind, RequestRecord
from shared.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT_S = 30.0
MAX_ERROR_CHARACTERS = 500
# What runs out on the generator's machine and not on the server's.
ERRNOS_OF_CLIENT = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    backend: Backend
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # hold the key
    sampling: Mapping[str, Any] = field(default_factory=dict)  # sent with every request
    ignore_eos: bool = False
    timeout_s: float = 3600.0
    is_streaming: bool = True
    asks_continuous_usage: bool = False  # a running count in each chunk; an extension that few know
    trace_share: float = 0.0  # of the requests, whose traces are to be kept; all have a trace id
    request_id_prefix: str | None = None  # of x-request-id; None: none is sent
    verifies_tls: bool = True
    keeps_text: bool = True  # of the answers, in the records


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None  # of an answer in one piece
    finish_reason: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class StreamEvent(msgspec.Struct):
    """The part of a completion, or of a chunk of one, that we read; servers may send more."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class RequestFailure(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class OpenAIClient:
    """Owns the connections: as many as requests run at once, kept for later requests."""

    def __init__(self, target: Target, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._target = target
        self._clock_ns = clock_ns
        self._decoder = msgspec.json.Decoder(StreamEvent)
        self._pool = ConnectionPool(urlsplit(target.url), clock_ns, verifies_tls=target.verifies_tls)
        self._heads: dict[tuple[tuple[str, str], ...], bytes] = {}
        self._random = random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    async def send(self, prompt: Prompt, record: RequestRecord) -> None:
        """Makes the request and fills the record, whatever happens. Raises only on our own bugs."""
        record.num_prompt_tokens = prompt.num_tokens
        record.is_streamed = self._target.is_streaming
        request = self._request(prompt, record)
        answer = _CompletionAnswer(record, self._decoder, keeps_text=self._target.keeps_text)
        loop = asyncio.get_running_loop()
        connection = self._pool.take_idle()
        try:
            if connection is None:
                begun_ns = self._clock_ns()
                async with asyncio.timeout(min(CONNECT_TIMEOUT_S, self._target.timeout_s)):
                    connection = await self._pool.open()
                record.connect_ns = self._clock_ns() - begun_ns
        except OSError as error:  # TimeoutError too
            kind: FailureKind = "client" if error.errno in ERRNOS_OF_CLIENT else "connection"
            told = str(error) or "no connection in time"
            record.failure, record.error = kind, f"{type(error).__name__}: {told}"
            record.t_end_ns = self._clock_ns()
            return
        expiry = loop.call_later(self._target.timeout_s, self._expire, answer)
        try:
            record.t_sent_ns = self._clock_ns()
            connection.start(request, answer)
            await answer.done
        finally:
            expiry.cancel()
            if connection.is_busy:  # given up by us, in the middle of an answer
                connection.close()
            self._pool.give_back(connection)

    def body_of(self, prompt: Prompt) -> bytes:
        target = self._target
        body: dict[str, Any] = {
            "model": prompt.model or target.model,
            "stream": target.is_streaming,
            "max_tokens": prompt.num_output_tokens,
            **target.sampling,
        }
        if target.is_streaming:
            body["stream_options"] = {"include_usage": True}
            if target.asks_continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if target.backend == "openai-chat":
            body["messages"] = [
                *({"role": role, "content": text} for role, text in prompt.history),
                {"role": "user", "content": prompt.content},
            ]
        elif prompt.history:
            assert isinstance(prompt.content, str), "turns of conversations are text"
            body["prompt"] = "\n\n".join([*(text for _, text in prompt.history), prompt.content])
        else:
            body["prompt"] = prompt.content
        if target.ignore_eos:
            body["ignore_eos"] = True
            body["min_tokens"] = prompt.num_output_tokens
        return msgspec.json.encode(body)

    def _request(self, prompt: Prompt, record: RequestRecord) -> bytes:
        """Head and body. The trace id is ours, so that a slow request can be looked up in the traces."""
        body = self.body_of(prompt)
        head = self._heads.get(prompt.headers)
        if head is None:
            head = self._heads[prompt.headers] = request_head(self._target, prompt.headers)
        ids = self._random.getrandbits(192) | 1 << 64 | 1  # neither id may be 0
        record.trace_id = f"{ids >> 64:032x}"
        record.is_trace_sampled = self._random.random() < self._target.trace_share
        flags = "01" if record.is_trace_sampled else "00"
        more = f"traceparent: 00-{record.trace_id}-{ids & 0xFFFFFFFFFFFFFFFF:016x}-{flags}\r\n"
        if self._target.request_id_prefix is not None:
            more += f"x-request-id: {self._target.request_id_prefix}{record.index}\r\n"
        return b"%s%sContent-Length: %d\r\n\r\n%s" % (head, more.encode("latin-1"), len(body), body)

    def _expire(self, answer: _CompletionAnswer) -> None:
        message = f"no end after {self._target.timeout_s:g} s"
        answer.fail(RequestFailure("timeout", message), self._clock_ns())


class _CompletionAnswer:
    """Fills the record of one request while its answer arrives; `done` is set when it is complete."""

    def __init__(
        self, record: RequestRecord, decoder: msgspec.json.Decoder[StreamEvent], *, keeps_text: bool
    ) -> None:
        self._record = record
        self._decoder = decoder
        self._keeps_text = keeps_text
        self._text: list[str] = []
        self._events = EventStream()
        self._body: list[bytes] = []  # of an answer that is no stream
        self._is_done = False  # [DONE] was seen
        self._num_tokens_told = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take_head(self, status: int, headers: Mapping[bytes, bytes], now_ns: int) -> None:
        record = self._record
        record.t_headers_ns = now_ns
        record.http_status = status
        if (request_id := headers.get(b"x-request-id")) is not None:
            record.server_request_id = request_id.decode("latin-1")

    def take_body(self, piece: bytes, now_ns: int) -> None:
        if self._record.http_status != 200 or not self._record.is_streamed:
            self._body.append(piece)
            return
        for event in self._events.feed(piece):
            if event == b"[DONE]":
                self._is_done = True
            else:
                self._take_event(event, now_ns)

    def take_end(self, now_ns: int) -> None:
        record = self._record
        if record.http_status != 200:
            reason = error_message(b"".join(self._body))
            raise RequestFailure("http_status", f"HTTP {record.http_status}: {reason}")
        if record.is_streamed:
            check_stream_complete(record, self._is_done)
        else:
            self._take_whole(b"".join(self._body), now_ns)
        self._close(now_ns)

    def fail(self, error: Exception, now_ns: int) -> None:
        if self.done.done():  # expired, and the connection then lost
            return
        record = self._record
        if isinstance(error, RequestFailure):
            record.failure, record.error = error.kind, str(error)
        elif isinstance(error, ProtocolError):
            record.failure, record.error = "bad_stream", str(error)
        elif not isinstance(error, OSError):
            self.done.set_exception(error)  # a bug of ours
            return
        elif record.t_headers_ns is None:
            record.failure, record.error = "connection", f"{type(error).__name__}: {error}"
        else:
            record.failure, record.error = "cut", f"connection lost inside the answer: {error}"
        self._close(now_ns)

    def _close(self, now_ns: int) -> None:
        self._record.t_end_ns = now_ns
        self._record.text = "".join(self._text)
        if not self.done.done():
            self.done.set_result(None)

    def _take_event(self, data: bytes, now_ns: int) -> None:
        record = self._record
        if record.t_first_event_ns is None:
            record.t_first_event_ns = now_ns
        event = self._decoded(data)
        usage = event.usage
        if usage is not None:
            take_usage(usage, record)
        if not event.choices:
            return
        record.chunk_times_ns.append(now_ns)
        if usage is not None and usage.completion_tokens is not None:
            record.chunk_tokens.append(usage.completion_tokens - self._num_tokens_told)
            self._num_tokens_told = usage.completion_tokens
        choice = event.choices[0]
        if choice.finish_reason is not None:
            record.finish_reason = choice.finish_reason
        self._take_content(choice.delta, choice.text, now_ns)

    def _take_whole(self, body: bytes, now_ns: int) -> None:
        """An answer in one piece: all of it is seen at its end, and no time of a token is known."""
        record = self._record
        record.t_first_event_ns = now_ns
        event = self._decoded(body)
        if event.usage is not None:
            take_usage(event.usage, record)
        if not event.choices:
            raise RequestFailure("empty", "the answer has no choices")
        choice = event.choices[0]
        record.chunk_times_ns.append(now_ns)
        record.finish_reason = choice.finish_reason
        self._take_content(choice.message, choice.text, now_ns)
        if record.num_output_tokens == 0:
            raise RequestFailure("empty", "the answer has no tokens")
        if record.finish_reason is None:
            raise RequestFailure("cut", "the answer has no finish_reason")

    def _take_content(self, delta: Delta | None, text: str | None, now_ns: int) -> None:
        record = self._record
        if delta is None:
            is_output = bool(text)
            is_content = is_output
        else:
            text = delta.content
            is_output = bool(text or delta.tool_calls)
            is_content = is_output or bool(delta.reasoning or delta.reasoning_content)
        if not is_content:
            return
        record.num_content_chunks += 1
        if record.t_first_token_ns is None:
            record.t_first_token_ns = now_ns
        if is_output and record.t_first_output_ns is None:
            record.t_first_output_ns = now_ns
        if text and self._keeps_text:
            self._text.append(text)

    def _decoded(self, data: bytes) -> StreamEvent:
        try:
            event = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestFailure("bad_stream", f"not a completion chunk: {error}") from error
        if event.error is not None:
            raise RequestFailure("error_event", error_message(data) or "error event without a message")
        return event


def request_head(target: Target, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    """All lines of the head that every request shares. Raises ConfigError for a header that is none."""
    parts = urlsplit(target.url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {
        "host": ("Host", parts.netloc.rpartition("@")[2]),
        "user-agent": ("User-Agent", "headrace-bench"),
        "content-type": ("Content-Type", "application/json"),
    }
    for name, value in (*target.headers.items(), *headers):  # later ones win
        fields[name.lower()] = (name, value)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.values())]
    try:
        encoded = [line.encode("latin-1") for line in lines]
    except UnicodeEncodeError as error:
        raise ConfigError("names and values of headers are Latin-1", "--header") from error
    if any(character in line for line in encoded for character in (b"\r", b"\n", b"\0")):
        raise ConfigError("a header has one line", "--header")
    return b"\r\n".join(encoded) + b"\r\n"


def open_session(headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """For the few requests that are not measured."""
    import aiohttp  # local: 0.2 s that a worker of the generator need not wait for

    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )


async def first_model(models_url: str, headers: Mapping[str, str]) -> str:
    """The first model that the server lists. Raises LookupError with what went wrong."""
    import aiohttp  # local: see above

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


def check_stream_complete(record: RequestRecord, is_done: bool) -> None:
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


def error_message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, else the beginning of the text."""
    try:
        error = msgspec.json.decode(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        message = body.decode("utf-8", "replace")
    return str(message)[:MAX_ERROR_CHARACTERS]
