"""HTTP by hand, for tests that send what no client library would."""

from __future__ import annotations

import http.client
import io
import socket
from urllib.parse import urlsplit

from tests.http_client import Answer

TIMEOUT_S = 10.0


def talk(url: str, *pieces: bytes) -> list[Answer]:
    """Sends the pieces over one connection, each once there is something to read of what came before it, and
    reads all that is answered until the other end closes."""
    host = urlsplit(url)
    data = b""
    with socket.create_connection((host.hostname, host.port), TIMEOUT_S) as connection:
        for number, piece in enumerate(pieces):
            if number:
                data += connection.recv(1000)
            connection.sendall(piece)
        while some := connection.recv(65536):
            data += some
    return answers_in(data)


def answers_in(data: bytes) -> list[Answer]:
    """All that one connection brought, to the last byte."""
    answers = []
    stream = _Socket(data)
    while stream.is_unread:
        response = http.client.HTTPResponse(stream)  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        answers.append(Answer(response.status, headers, response.read()))
    return answers


class _Socket:
    """As much of one as HTTPResponse looks at."""

    def __init__(self, data: bytes) -> None:
        self._file = _Unclosed(data)

    def makefile(self, _mode: str) -> io.BytesIO:
        return self._file

    @property
    def is_unread(self) -> bool:
        return self._file.tell() < len(self._file.getvalue())


class _Unclosed(io.BytesIO):
    def close(self) -> None:
        """Not by the response that was read from it: the next one follows."""
