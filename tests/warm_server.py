"""The program behind `tests.warm_process`: has imported what our processes run, forks one for each request.

Ends when the one who started it does, and takes its processes with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass

# What engines with fake models, gateways and the command line import sooner or later; torch is not among it.
MODULES = (
    "compose.cli",
    "compose.run_directory",
    "compose.service_logging",
    "compose.stack_config",
    "engine_service.fake_embedder",
    "engine_service.fake_model",
    "engine_service.main",
    "gateway.main",
    "loadtest.simulator.process",
)
MAX_REQUEST_BYTES = 1 << 17
_NUM_DESCRIPTORS = 3  # standard output, standard error, and where the end of the process is told


@dataclass(frozen=True, slots=True)
class Program:
    """`python -m module arguments...`"""

    module: str
    arguments: list[str]
    environment: dict[str, str]

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = [self.module, *self.arguments]
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


class WarmServer:
    """Owns the processes that it has forked, until it has told how they ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._told_at: dict[int, int] = {}  # where the end of a process is told, by its number
        self._woken, waker = socket.socketpair()
        self._woken.setblocking(False)
        waker.setblocking(False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)  # else it would not wake
        signal.set_wakeup_fd(waker.fileno())

    def serve(self) -> Program | None:
        """Returns in each new process what that is to run; in the server itself None, at its end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                        self._tell_of_ended()
                        continue
                    request, descriptors, _, _ = socket.recv_fds(
                        self._control, MAX_REQUEST_BYTES, _NUM_DESCRIPTORS
                    )
                    if not request:
                        self._kill_all()
                        return None
                    if (pid := os.fork()) == 0:
                        self._let_go()
                        _take_streams(descriptors)
                        return Program(**json.loads(request))
                    self._told_at[pid] = descriptors[2]
                    for descriptor in descriptors[:2]:
                        os.close(descriptor)
                    self._control.send(str(pid).encode())

    def _tell_of_ended(self) -> None:
        for pid in list(self._told_at):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                descriptor = self._told_at.pop(pid)
                os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(descriptor)

    def _kill_all(self) -> None:
        for pid in self._told_at:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _let_go(self) -> None:
        """In a new process: of all that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        self._woken.close()
        self._waker.close()
        for descriptor in self._told_at.values():
            os.close(descriptor)


def _take_streams(descriptors: list[int]) -> None:
    for descriptor, stream in zip(descriptors, (1, 2), strict=False):
        os.dup2(descriptor, stream)
    for descriptor in descriptors:
        os.close(descriptor)


def main(control_descriptor: int) -> Program | None:
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a new process would otherwise copy what it shares with the others
    return WarmServer(socket.socket(fileno=control_descriptor)).serve()


if __name__ == "__main__":
    # Outside of all calls: an exit or an error passes through what a fresh interpreter would have there.
    if (program := main(int(sys.argv[1]))) is not None:
        program.run()
