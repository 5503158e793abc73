"""One life of one server: started on a free port, waited for, ended by its own process id."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compose.die_with_parent import bound_to_this_process
from tests.benchmarks.peers.contestant import Contestant, Launch

POLL_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 20.0
NUM_LOG_LINES = 6


class ServerFailedError(Exception):
    """It did not become ready, or it ended before it was told to. Its text has the end of the log."""


@dataclass(frozen=True, slots=True)
class Server:
    base_url: str
    api_key: str | None
    pid: int
    ready_s: float  # from the start of the process to the first healthy answer
    log: Path


@contextmanager
def running(
    contestant: Contestant,
    folder: Path,
    num_threads: int,
    limits: Mapping[str, str],
    ready_timeout_s: float,
) -> Iterator[Server]:
    """Serves within the block. Call it from the main thread: the server dies with the thread that started it.

    `limits` are environment variables that keep it to an instruction set. Raises ServerFailedError.
    """
    folder.mkdir(parents=True)
    launch = Launch(free_port(), folder, num_threads)
    log = folder / "log.txt"
    with log.open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            bound_to_this_process(contestant.command(launch)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(contestant.environment(launch)) | dict(limits),
            cwd=folder,
            start_new_session=True,  # a process group of its own, to be ended as a whole
        )
    try:
        _wait_until_ready(process, contestant, launch, began + ready_timeout_s, log)
        ready_s = time.monotonic() - began
        yield Server(launch.base_url, contestant.api_key(launch), process.pid, ready_s, log)
        if process.poll() is not None:
            raise ServerFailedError(f"ended by itself with {process.returncode}: {last_lines(log)}")
    finally:
        _end(process)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-NUM_LOG_LINES:])


def _wait_until_ready(
    process: subprocess.Popen[bytes], contestant: Contestant, launch: Launch, deadline: float, log: Path
) -> None:
    url = launch.base_url + contestant.health_path
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the proxy
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailedError(f"ended with {process.returncode} before it was ready: {last_lines(log)}")
        # HTTPError is an OSError, too: 503 while it loads. So are refusals and time-outs.
        with contextlib.suppress(OSError), opener.open(url, timeout=PROBE_TIMEOUT_S) as answer:
            if answer.status == 200 and contestant.is_ready(launch):
                return
        time.sleep(POLL_INTERVAL_S)
    raise ServerFailedError(f"not ready in time: {last_lines(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """By SIGTERM, then the whole group by SIGKILL, whatever of it is left."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
