"""A stack on free ports that lives as long as a `with` block: for benchmarks and tests."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from compose.die_with_parent import bound_to_this_process
from compose.run_directory import StackRecord, read_stack
from compose.stack_config import ADMIN_TOKEN, KEY_PEPPER, REDIS_URL
from compose.stack_plan import headrace
from shared.errors import ConfigError

POLL_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 60.0
NUM_LOG_LINES = 15


@contextmanager
def temporary_stack(
    *arguments: str, ready_timeout_s: float = 600.0, environment: Mapping[str, str] = os.environ
) -> Iterator[StackRecord]:
    """Runs `headrace up ARGUMENTS` with its own Valkey, port and run directory; gone after the block.

    Raises ConfigError with the end of its log when it does not become ready. Call it from the main
    thread: a stack dies with the thread that started it.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:
        run_directory = Path(name)
        log = run_directory / "up.log"
        own_secrets = (REDIS_URL, KEY_PEPPER, ADMIN_TOKEN)  # of another stack, perhaps
        with log.open("wb") as output:
            process = subprocess.Popen(
                bound_to_this_process(
                    headrace("up", "--port", "0", "--run-dir", str(run_directory), *arguments)
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in environment.items() if key not in own_secrets},
                start_new_session=True,  # a Ctrl-C in the terminal ends the block first, then the stack
            )
        try:
            yield _ready(process, run_directory, log, ready_timeout_s)
        finally:
            _stop(process)


def _ready(process: subprocess.Popen[bytes], run_directory: Path, log: Path, timeout_s: float) -> StackRecord:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if stack := read_stack(run_directory):
            return stack
        time.sleep(POLL_INTERVAL_S)
    raise ConfigError("the stack did not become ready:\n" + _last_lines(log), None)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # takes its services with it
        process.wait()


def _last_lines(log: Path) -> str:
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-NUM_LOG_LINES:])
