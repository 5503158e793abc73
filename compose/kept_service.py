"""One service of a stack over all of its lives: started, and started again when it crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from compose.console import Console
from compose.restart_backoff import RestartBackoff
from compose.service_process import ServiceProcess, ServiceSpec

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2  # what every `headrace` command returns for an error that no restart can cure
MAX_FAILED_STARTS = 5  # in a row, before the stack was ever ready


class StackFailed(Exception):  # noqa: N818 - reads as what happened
    """The stack cannot run. The message says why."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class StackEvents:
    """What a service tells the stack that it belongs to, and asks of it."""

    process_changed: Callable[[], None]  # another process, or none at the moment
    stack_was_ready: Callable[[], bool]  # from then on nothing is given up


class KeptService:
    """Owns the processes of one service, one at a time."""

    def __init__(
        self,
        make_spec: Callable[[], ServiceSpec],
        console: Console,
        events: StackEvents,
        *,
        after_crash: Callable[[int], Awaitable[None]] | None = None,  # gets the dead process's id
        backoff: RestartBackoff | None = None,
    ) -> None:
        self._make_spec = make_spec
        self._console = console
        self._events = events
        self._after_crash = after_crash
        self._backoff = backoff or RestartBackoff()
        self._process: ServiceProcess | None = None

    @property
    def pid(self) -> int | None:
        """None while no process runs."""
        return self._process.pid if self._process is not None and self._process.is_running else None

    async def start(self) -> ServiceProcess:
        self._process = await ServiceProcess.start(self._make_spec(), self._console.log)
        self._events.process_changed()
        return self._process

    async def keep(self) -> None:
        """Restarts it whenever it ends, until cancelled. Raises StackFailed when that is pointless."""
        process = self._process
        assert process is not None, "keep() before start()"
        while True:
            code = await process.wait()
            pause_s = self._backoff.after_crash(process.lifetime_s)
            self._events.process_changed()
            name = process.spec.name
            if not self._events.stack_was_ready():
                self._give_up_if_pointless(process, code)
            for line in process.last_lines if process.spec.is_quiet else ():
                self._console.log(name, line)
            self._console.log(name, f"ended with {_described(code)}; next start in {pause_s:g} s")
            if self._after_crash is not None:
                await self._after_crash(process.pid)
            process = await self._start_after(pause_s, name)

    async def _start_after(self, pause_s: float, name: str) -> ServiceProcess:
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await self.start()
            except OSError as error:  # no memory or no process left for now
                pause_s = self._backoff.after_crash(lifetime_s=0.0)
                self._console.log(name, f"cannot be started: {error}; next try in {pause_s:g} s")

    async def stop(self) -> None:
        """Idempotent. Cancel `keep` first."""
        if self._process is not None and self._process.is_running:
            await self._process.stop()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _give_up_if_pointless(self, process: ServiceProcess, code: int) -> None:
        reason = process.last_lines[-1] if process.last_lines else "it said nothing"
        if code == EXIT_BAD_CONFIG:
            raise StackFailed(f"{process.spec.name}: {reason}", EXIT_BAD_CONFIG)
        if self._backoff.num_crashes >= MAX_FAILED_STARTS:
            raise StackFailed(
                f"{process.spec.name} failed {MAX_FAILED_STARTS} times in a row; its last words: {reason}"
            )


def _described(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
