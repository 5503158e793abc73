"""Compressed bodies of requests."""

from __future__ import annotations

import gzip

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable, check_in
from loadtest.conformance.encodings import deflated, gzip_bomb, stored_brotli, stored_zstd, zstd_bomb
from loadtest.conformance.row import row
from loadtest.conformance.server import Server


async def send_encoded(server: Server, encoding: str, data: bytes) -> Answer:
    return await server.post("/v1/chat/completions", data, headers={"Content-Encoding": encoding})


async def check_taken(server: Server, encoding: str, data: bytes) -> None:
    answer = await send_encoded(server, encoding, data)
    if answer.status == 415:
        raise NotApplicable(f"the server takes no {encoding}: {answer.says}")
    answer.ok()


@row
async def gzip_is_taken(server: Server) -> None:
    """Content-Encoding gzip."""
    await check_taken(server, "gzip", gzip.compress(server.raw_chat()))


@row
async def deflate_is_taken(server: Server) -> None:
    """Content-Encoding deflate."""
    await check_taken(server, "deflate", deflated(server.raw_chat()))


@row
async def brotli_is_taken(server: Server) -> None:
    """Content-Encoding br."""
    await check_taken(server, "br", stored_brotli(server.raw_chat()))


@row
async def zstd_is_taken(server: Server) -> None:
    """Content-Encoding zstd."""
    await check_taken(server, "zstd", stored_zstd(server.raw_chat()))


@row
async def an_unknown_encoding_is_refused(server: Server) -> None:
    """An encoding that does not exist is 415."""
    (await send_encoded(server, "frobnicate", server.raw_chat())).refused(415)


@row
async def a_garbled_body_is_refused(server: Server) -> None:
    """What is not what it says it is encoded in, or ends early, is 400."""
    for data in (server.raw_chat(), gzip.compress(server.raw_chat())[:-20]):
        answer = await send_encoded(server, "gzip", data)
        if answer.status == 415:
            raise NotApplicable(f"the server takes no gzip: {answer.says}")
        answer.refused(400)


@row
async def a_gzip_bomb_is_refused(server: Server) -> None:
    """64 KB that become 64 MB are 413."""
    await check_bomb(server, "gzip", gzip_bomb(server.raw_chat()))


@row
async def a_zstd_bomb_is_refused(server: Server) -> None:
    """2 KB that become 64 MB are 413."""
    await check_bomb(server, "zstd", zstd_bomb(server.raw_chat()))


async def check_bomb(server: Server, encoding: str, data: bytes) -> None:
    answer = await send_encoded(server, encoding, data)
    if answer.status == 415:
        raise NotApplicable(f"the server takes no {encoding}")
    check_in(answer.status, (413,), "status")
    answer.refused(413)
