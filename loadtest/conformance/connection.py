"""HTTP/1.1 by hand over one socket: for requests that no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import CheckFailed, check

MAX_HEAD_BYTES = 65_536


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(
        cls, host: str, port: int, tls: ssl.SSLContext | None, receive_buffer_bytes: int | None
    ) -> Connection:
        """`receive_buffer_bytes`: of the kernel; with a small one, not to read is felt at once."""
        family, kind, protocol, _, address = (
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )[0]
        bare = socket.socket(family, kind, protocol)
        bare.setblocking(False)
        if receive_buffer_bytes is not None:
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(bare, address)
            limit = receive_buffer_bytes or MAX_HEAD_BYTES  # of what the reader takes in ahead
            reader, writer = await asyncio.open_connection(
                sock=bare, ssl=tls, server_hostname=host if tls else None, limit=max(limit, 16_384)
            )
        except BaseException:
            bare.close()
            raise
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def send_end(self) -> None:
        """Closes the sending half."""
        self._writer.write_eof()

    async def read_some(self, limit: int = 65_536) -> bytes:
        """b"" at the end."""
        return await self._reader.read(limit)

    async def is_closed_by_peer(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                return await self._reader.read(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    async def read_answer(self, path: str = "", *, has_body: bool = True) -> Answer:
        """The next answer, whole. 100 Continue is skipped. Raises CheckFailed if it is none."""
        status, headers = await self.read_head()
        while status == 100:
            status, headers = await self.read_head()
        body = await self.read_body(headers) if has_body and status not in (204, 304) else b""
        return Answer(path, status, headers, body)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            what = f"after {error.partial[:60]!r}" if error.partial else "without an answer"
            raise CheckFailed(f"the server closed the connection {what}") from error
        except (asyncio.LimitOverrunError, ConnectionError) as error:
            raise CheckFailed(f"no HTTP answer: {error}") from error
        first, *lines = head.decode("latin-1").split("\r\n")
        check(first.startswith("HTTP/1."), f"no HTTP answer: {first[:60]!r}")
        headers = {}
        for line in filter(None, lines):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(first.split()[1]), headers

    async def read_body(self, headers: dict[str, str]) -> bytes:
        try:
            if "chunked" in headers.get("transfer-encoding", ""):
                return await self._read_chunks()
            if "content-length" in headers:
                return await self._reader.readexactly(int(headers["content-length"]))
            return await self._reader.read()
        except asyncio.IncompleteReadError as error:
            raise CheckFailed(f"the body ends early, after {len(error.partial)} bytes of a part") from error

    async def _read_chunks(self) -> bytes:
        pieces = []
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            pieces.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        await self._reader.readuntil(b"\r\n")
        return b"".join(pieces)

    def close(self) -> None:
        """At once: what the server still sends is not read."""
        with contextlib.suppress(OSError):
            self._writer.transport.abort()
