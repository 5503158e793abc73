"""HTTP/1.1 over bare sockets."""

from __future__ import annotations

import asyncio
import json

from loadtest.conformance.check import check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

CHAT = "/v1/chat/completions"
CHUNKED = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}


def without_length(request: bytes) -> bytes:
    lines = request.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"content-length"))


def pieces_of(body: bytes, size: int) -> list[bytes]:
    return [body[begin : begin + size] for begin in range(0, len(body), size)]


@row
async def a_connection_is_kept(server: Server) -> None:
    """Two requests go over one connection, also after a stream and an error."""
    bodies = [server.chat_body(stream=True), server.chat_body(temperature="hot"), server.chat_body()]
    async with server.connection() as connection:
        for body, status in zip(bodies, (200, 400, 200), strict=True):
            await connection.send(server.raw_request("POST", CHAT, json.dumps(body).encode()))
            check_equal((await connection.read_answer()).status, status, "status")


@row
async def pipelined_requests_are_answered_in_order(server: Server) -> None:
    """Requests sent without waiting are answered one after the other."""
    long = json.dumps(server.chat_body(max_tokens=32)).encode()
    async with server.connection() as connection:
        await connection.send(
            server.raw_request("POST", CHAT, long) + server.raw_request("GET", "/v1/models")
        )
        check_equal(
            (await connection.read_answer()).ok().json["object"], "chat.completion", "the first object"
        )
        check_equal((await connection.read_answer()).ok().json["object"], "list", "the second object")


@row
async def chunked_bodies_are_read(server: Server) -> None:
    """A body in chunks of seven bytes, which split characters, is a body."""
    body = json.dumps(
        server.chat_body(messages=[{"role": "user", "content": "日本語 🦜"}]), ensure_ascii=False
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces_of(body.encode(), 7))
    async with server.connection() as connection:
        await connection.send(
            without_length(server.raw_request("POST", CHAT, headers=CHUNKED)) + chunks + b"0\r\n\r\n"
        )
        (await connection.read_answer()).ok()


@row
async def a_slow_body_is_awaited(server: Server) -> None:
    """A body that comes piece by piece is a body."""
    request = server.raw_request("POST", CHAT, server.raw_chat())
    async with server.connection() as connection:
        for piece in pieces_of(request, len(request) // 5 + 1):
            await connection.send(piece)
            await asyncio.sleep(0.02)
        (await connection.read_answer()).ok()


@row
async def continue_is_said(server: Server) -> None:
    """Expect: 100-continue gets its 100 before the body is sent."""
    body = server.raw_chat()
    head = server.raw_request(
        "POST", CHAT, headers={"Expect": "100-continue", "Content-Length": str(len(body))}
    )
    async with server.connection() as connection:
        await connection.send(head)
        check_equal((await connection.read_head())[0], 100, "the first status")
        await connection.send(body)
        (await connection.read_answer()).ok()


@row
async def head_has_no_body(server: Server) -> None:
    """HEAD answers with headers only, and the connection goes on."""
    async with server.connection() as connection:
        await connection.send(server.raw_request("HEAD", "/v1/models"))
        answer = await connection.read_answer("/v1/models", has_body=False)
        check_in(answer.status, (200, 405), "status")
        await connection.send(server.raw_request("GET", "/v1/models"))
        (await connection.read_answer()).ok()


@row
async def close_is_obeyed(server: Server) -> None:
    """After `Connection: close` the server closes."""
    async with server.connection() as connection:
        await connection.send(server.raw_request("GET", "/v1/models", headers={"Connection": "close"}))
        (await connection.read_answer()).ok()
        check(await connection.is_closed_by_peer(5), "the connection is still open after 5 s")


@row
async def older_clients_are_answered(server: Server) -> None:
    """HTTP/1.0: no chunks, and the end of the connection is the end of a stream."""
    body = json.dumps(server.chat_body(stream=True)).encode()
    async with server.connection() as connection:
        await connection.send(server.raw_request("POST", CHAT, body, version="HTTP/1.0"))
        answer = (await connection.read_answer()).ok()
        check("chunked" not in answer.headers.get("transfer-encoding", ""), "the answer is chunked")
        check(answer.body.endswith(b"data: [DONE]\n\n"), "the stream is not whole")


@row
async def a_half_closed_client_is_let_go(server: Server) -> None:
    """A client that closes its sending half is answered or let go, and harms nobody."""
    async with server.connection() as connection:
        await connection.send(server.raw_request("POST", CHAT, server.raw_chat()))
        connection.send_end()
        while await connection.read_some():
            pass
    (await server.chat()).ok()


@row
async def clients_that_leave_harm_nobody(server: Server) -> None:
    """After streams and bodies that were broken off the next request is answered as ever."""
    expected = (await server.chat()).ok().json["choices"]
    stream = json.dumps(server.chat_body(stream=True, max_tokens=200)).encode()
    for request in [server.raw_request("POST", CHAT, stream)] * 3 + [
        server.raw_request("POST", CHAT, b"{", headers={"Content-Length": "1000"})
    ] * 2:
        async with server.connection() as connection:
            await connection.send(request)
            if request.endswith(b"}"):
                await connection.read_some(64)
    check_equal((await server.chat()).ok().json["choices"], expected, "the next answer")


@row
async def ambiguous_lengths_are_refused(server: Server) -> None:
    """Two lengths, or a length and chunks, could smuggle a request: 400, and no second answer."""
    smuggled = server.raw_request("GET", "/v1/models")
    both = (
        server.raw_request("POST", CHAT, headers={**CHUNKED, "Content-Length": "4"}) + b"0\r\n\r\n" + smuggled
    )
    twice = server.raw_request("POST", CHAT, b"{}").replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n", 1)
    for request in (both, twice + smuggled):
        async with server.connection() as connection:
            await connection.send(request)
            received = b""
            while piece := await connection.read_some():
                received += piece
        check(received.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), f"the answer is {received[:40]!r}")
        check_equal(received.count(b"HTTP/1."), 1, "the number of answers")


@row
async def garbled_chunks_are_refused(server: Server) -> None:
    """A size that is no number is 400."""
    async with server.connection() as connection:
        await connection.send(
            without_length(server.raw_request("POST", CHAT, headers=CHUNKED)) + b"zz\r\nab\r\n"
        )
        check_equal((await connection.read_answer()).status, 400, "status")


@row
async def what_is_no_http_is_refused(server: Server) -> None:
    """A line that is no request is 400, and the connection is closed."""
    async with server.connection() as connection:
        await connection.send(b"HELLO\r\n\r\n")
        check_equal((await connection.read_answer()).status, 400, "status")
        check(await connection.is_closed_by_peer(5), "the connection is still open after 5 s")
