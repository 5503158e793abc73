"""Processes of ours that start in a fifth of the time, for tests that are about what they do afterwards.

Most of what a gateway or an engine with a fake model costs to start is imports: half a second to one of a
core. Here a server (see `tests.warm_server`) has done them once and forks. What runs is the same program with
arguments, environment, streams and signals of its own. Tests about the start itself, and about what a process
has loaded, take a fresh one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TextIO

from tests.warm_server import MAX_REQUEST_BYTES, Program

ROOT = Path(__file__).parent.parent
# Variables that an interpreter or a loader reads before any of our code: a fork comes too late for them.
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "OTEL_", "OPENBLAS_")


class WarmProcess:
    """As a subprocess.Popen. Its end is told by the server, whose child it is."""

    def __init__(self, pid: int, told: int, arguments: list[str]) -> None:
        self.pid = pid
        self.args = arguments
        self.returncode: int | None = None
        self.stderr: TextIO | None = None  # for who has a pipe there
        self._told = told  # gets the exit status, and is closed with it
        self._watch = select.poll()
        self._watch.register(told, select.POLLIN)
        self._one_reader = threading.Lock()

    def poll(self) -> int | None:
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if (status := self._ended_within(timeout)) is None:
            assert timeout is not None, "without a limit one waits for the end"
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the server is about to tell
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            self._watch.poll(None if timeout_s is None else timeout_s * 1000)
        with self._one_reader:  # one thread may wait while another sends a signal
            if self.returncode is None and self._watch.poll(0):
                told = os.read(self._told, 16)
                assert told, "the server of warm processes has died"
                os.close(self._told)
                self.returncode = int(told)
            return self.returncode


def start_warm(
    module: str,
    *arguments: str,
    environment: dict[str, str],
    stdout: int,
    stderr: int,
) -> WarmProcess:
    """`python -m module arguments...` in ROOT, its input empty. The descriptors are the caller's to close."""
    program = Program(module, list(arguments), environment)
    told, tell = os.pipe()
    try:
        pid = _server().start(program, [stdout, stderr, tell])
    finally:
        os.close(tell)
    return WarmProcess(pid, told, [module, *arguments])


def can_be_warm(environment: dict[str, str]) -> bool:
    """Whether a process in this environment is the same if it is forked."""
    changed = {name for name, _ in environment.items() ^ _server().environment.items()}
    return not any(name.startswith(_READ_AT_START) for name in changed)


class _Server:
    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._one_request = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_server", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, program: Program, descriptors: list[int]) -> int:
        request = json.dumps(asdict(program)).encode()
        assert len(request) <= MAX_REQUEST_BYTES, "an environment of this size was not thought of"
        with self._one_request:
            socket.send_fds(self._control, [request], descriptors)
            answer = self._control.recv(64)
        assert answer, "the server of warm processes has died"
        return int(answer)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def _server() -> _Server:
    """One for this process of pytest, from its first use on."""
    server = _Server()
    atexit.register(server.close)
    return server
