"""Connections to one server: as many as requests run, kept between requests."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable
from urllib.parse import SplitResult

from loadtest.http_connection import HttpConnection

# Servers of Python and Node close idle connections after 5 s. Given up earlier, none is used in the
# moment in which its server closes it, which would look like a failure of the server.
MAX_IDLE_NS = 4_000_000_000


class ConnectionPool:
    """No limit on their number, no proxies, and names are resolved once: all of those would become part
    of the measurement. Where a name has several addresses, connections go to all in turn; an address
    that cannot be reached is left out from then on, unless none can.
    """

    def __init__(self, url: SplitResult, clock_ns: Callable[[], int], *, verifies_tls: bool = True) -> None:
        assert url.hostname, "options are checked to name a host"
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._clock_ns = clock_ns
        self._tls = _tls_context(verifies_tls) if url.scheme == "https" else None
        self.addresses: list[str] = []
        self._next_address = 0
        self._idle: list[HttpConnection] = []  # the last one back is the first one out
        self._all: set[HttpConnection] = set()

    async def resolve(self) -> None:
        """Raises OSError for a name that does not exist."""
        raise_file_limit()
        found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        self.addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_reusable:
                self._all.discard(connection)
            elif self._clock_ns() - connection.idle_since_ns > MAX_IDLE_NS:
                self._forget(connection)
            else:
                return connection
        return None

    async def open(self) -> HttpConnection:
        """A new connection. Raises OSError, or ssl.SSLError, which is one."""
        if not self.addresses:
            await self.resolve()
        unreachable: dict[str, OSError] = {}
        for _ in range(len(self.addresses)):
            address = self.addresses[self._next_address % len(self.addresses)]
            self._next_address += 1
            try:
                connection = await self._open_to(address)
            except OSError as error:
                unreachable[address] = error
                continue
            self.addresses = [one for one in self.addresses if one not in unreachable]
            self._all.add(connection)
            return connection
        raise next(iter(unreachable.values()))

    def give_back(self, connection: HttpConnection) -> None:
        """After an exchange, whatever became of it."""
        if connection.is_reusable:
            connection.idle_since_ns = self._clock_ns()
            self._idle.append(connection)
        else:
            self._forget(connection)

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()

    async def _open_to(self, address: str) -> HttpConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: HttpConnection(self._clock_ns),
            address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        return connection

    def _forget(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        connection.close()


def raise_file_limit() -> None:
    """As many open files as the system lets us: each connection is one, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tls_context(verifies: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
