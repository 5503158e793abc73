"""An OpenAI-compatible server that answers at once, for gateways that pass HTTP on: as little work as a
server can have, so that what is measured is the gateway."""

from __future__ import annotations

import asyncio
import json
from multiprocessing.connection import Connection
from typing import cast

import uvloop

NUM_PROMPT_TOKENS = 100
NUM_TOKENS = 16
MODEL = "bench"
_STREAM_WORDS = b'"stream":true', b'"stream": true'


def run(control: Connection) -> None:
    """Tells its port over `control`, and serves until anything comes back."""
    uvloop.run(_serve(control))


async def _serve(control: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(_Answerer, "127.0.0.1", 0)
    control.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(control.recv)
    server.close()


class _Answerer(asyncio.Protocol):
    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head_end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:head_end].lower()
            length = _content_length(head)
            end = head_end + 4 + length
            if len(self._received) < end:
                return
            body, self._received = self._received[head_end + 4 : end], self._received[end:]
            if not length:  # a peer looks at /health or /v1/models
                self._transport.write(_MODELS)
            elif any(words in body for words in _STREAM_WORDS):
                self._transport.write(_STREAM_HEAD)
                for event in _EVENTS:
                    self._transport.write(event)
            else:
                self._transport.write(_WHOLE)


def _content_length(head: bytes) -> int:
    at = head.find(b"\r\ncontent-length:")
    return 0 if at < 0 else int(head[at + 17 :].split(b"\r\n", 1)[0])


def _with_length(document: object) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return _chunk(b"data: " + json.dumps({**event, "choices": [choice]}).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_USAGE = {
    "prompt_tokens": NUM_PROMPT_TOKENS,
    "completion_tokens": NUM_TOKENS,
    "total_tokens": NUM_PROMPT_TOKENS + NUM_TOKENS,
}
_MESSAGE = {"role": "assistant", "content": "word " * NUM_TOKENS}
_WHOLE = _with_length(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "length"}],
        "usage": _USAGE,
    }
)
_MODELS = _with_length({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENTS = (
    _event({"role": "assistant", "content": ""}),
    *(_event({"content": "word "}) for _ in range(NUM_TOKENS)),
    _event({}, "length"),
    _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
)
