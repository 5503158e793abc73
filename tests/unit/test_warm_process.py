"""The forked processes of other tests are as if each had been started by itself."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.warm_process import WarmProcess, can_be_warm, start_warm

# In a module of the standard library that runs what it is told.
TELLS_OF_ITSELF = """
import os, signal, sys
print(os.environ.get("OF_ONE"), os.listdir("/proc/self/fd"), signal.getsignal(signal.SIGCHLD).name)
print(repr(sys.stdin.read()), file=sys.stderr)
sys.stdout.flush()
sys.stderr.flush()
os._exit(7)
"""
SLEEPS = "import time; print('sleeps', flush=True); time.sleep(600)"


@contextmanager
def started(directory: Path, program: str, **environment: str) -> Iterator[WarmProcess]:
    """Its streams go to the files `out` and `err` of the directory."""
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        process = start_warm(
            *("timeit", "-n1", "-r1", program),
            environment={**os.environ, **environment},
            stdout=out.fileno(),
            stderr=err.fileno(),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_status_streams_and_environment_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with (
        started(tmp_path / "other", SLEEPS),
        started(tmp_path, TELLS_OF_ITSELF, OF_ONE="yes") as process,
    ):
        assert process.wait(20) == process.poll() == 7
    environment, _, rest = (tmp_path / "out").read_text().partition(" ")
    assert environment == "yes"
    # Beside its streams only the folder that is listed: nothing of the server's, nor of another process.
    assert rest == "['0', '1', '2', '3'] SIG_DFL\n"
    assert (tmp_path / "err").read_text() == "''\n"
    assert "OF_ONE" not in os.environ


def test_a_signal_ends_it_and_only_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with started(tmp_path, SLEEPS) as process, started(tmp_path / "other", SLEEPS) as other:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        assert other.poll() is None
        process.kill()  # once more does nothing, though another process might have its number by now


@pytest.mark.parametrize(
    ("environment", "is_possible"),
    [({"HEADRACE_REDIS_URL": "redis://x"}, True), ({"PYTHONPATH": "x"}, False), ({"OTEL_X": "y"}, False)],
)
def test_what_is_read_at_an_interpreters_start_needs_one(
    environment: dict[str, str], is_possible: bool
) -> None:
    assert can_be_warm({**os.environ, **environment}) is is_possible
