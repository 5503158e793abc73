"""One life of one service: a child process, its output line by line, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compose.die_with_parent import bound_to_this_process

MAX_LINE_BYTES = 16 * 1024  # a longer one is cut into pieces
NUM_LAST_LINES = 20
OUTPUT_GRACE_S = 1.0  # a grandchild may hold the pipe open after the service has ended

OnLine = Callable[[str, str], None]  # name of the service, line


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How to run a service. `environment` replaces the supervisor's own."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_timeout_s: float  # between SIGTERM and SIGKILL
    is_quiet: bool = False  # its lines are kept but shown only when it crashes


class ServiceProcess:
    """Owns the child and its process group.

    The child leads a session of its own, so a Ctrl-C in the terminal reaches the supervisor alone,
    which then ends the services in order. It dies with this process, however that ends.
    """

    def __init__(self, spec: ServiceSpec, process: asyncio.subprocess.Process, on_line: OnLine) -> None:
        self.spec = spec
        self.started_at = time.monotonic()
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._process = process
        self._on_line = on_line
        self._reader = asyncio.create_task(self._read_output(), name=f"output of {spec.name}")
        self._ended = asyncio.create_task(self._wait_for_end(), name=f"end of {spec.name}")

    @classmethod
    async def start(cls, spec: ServiceSpec, on_line: OnLine) -> ServiceProcess:
        """Must be called from the main thread (see die_with_parent)."""
        process = await asyncio.create_subprocess_exec(
            *bound_to_this_process(spec.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(spec.environment),
            start_new_session=True,
        )
        return cls(spec, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self._ended.done()

    @property
    def lifetime_s(self) -> float:
        return time.monotonic() - self.started_at

    async def wait(self) -> int:
        """The exit code (minus the signal's number if one ended it), once all output has been passed on."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> int:
        """Asks it to end, waits `stop_timeout_s`, then kills it. Returns the exit code."""
        self._signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), self.spec.stop_timeout_s)
        except TimeoutError:
            self._on_line(self.spec.name, f"still running after {self.spec.stop_timeout_s:g} s; killing it")
            self.kill()
            return await self.wait()

    def kill(self) -> None:
        """Ends it and all that it started, at once."""
        if self.is_running:
            self._signal_group(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _wait_for_end(self) -> int:
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)  # what the service started and left behind
        await asyncio.wait([self._reader], timeout=OUTPUT_GRACE_S)
        self._reader.cancel()
        return code

    async def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None, "started without a pipe"
        pending = b""
        while chunk := await stream.read(MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) >= MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._pass_on(line)
        if pending:
            self._pass_on(pending)

    def _pass_on(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip()
        if line:
            self.last_lines.append(line)
            if not self.spec.is_quiet:
                self._on_line(self.spec.name, line)
