"""Parts of the supervisor that need no service: back-off, run directory, child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from compose.die_with_parent import bound_to_this_process
from compose.kept_service import KeptService, StackEvents, StackFailed
from compose.restart_backoff import RestartBackoff
from compose.run_directory import MAX_SOCKET_PATH_BYTES, RunDirectory, read_secrets
from compose.service_process import MAX_LINE_BYTES, ServiceProcess, ServiceSpec
from shared.errors import ConfigError


class Lines:
    """Collects what services print."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self.any_came = asyncio.Event()

    def log(self, service: str, line: str) -> None:
        self.all.append((service, line))
        self.any_came.set()


def python(code: str, *, stop_timeout_s: float = 5.0) -> ServiceSpec:
    return ServiceSpec("child", (sys.executable, "-c", code), dict(os.environ), stop_timeout_s)


def is_gone(pid: int, timeout_s: float = 5.0) -> bool:
    """A zombie counts: nobody may be left to reap an orphan in a container."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def test_pauses_double_up_to_a_cap() -> None:
    backoff = RestartBackoff(first_s=1, cap_s=8)
    assert [backoff.after_crash(lifetime_s=0.1) for _ in range(6)] == [1, 2, 4, 8, 8, 8]


def test_a_service_that_ran_well_starts_over_at_the_first_pause() -> None:
    backoff = RestartBackoff(first_s=1, ran_well_after_s=60)
    for _ in range(4):
        backoff.after_crash(lifetime_s=0.1)
    assert backoff.after_crash(lifetime_s=61) == 1
    assert backoff.after_crash(lifetime_s=1) == 2


def test_output_is_passed_on_line_by_line(tmp_path: Path) -> None:
    async def story() -> tuple[int, Lines]:
        lines = Lines()
        code = f"print('one'); print('x' * {3 * MAX_LINE_BYTES}); print('no newline', end='')"
        process = await ServiceProcess.start(python(code), lines.log)
        return await process.wait(), lines

    code, lines = asyncio.run(story())
    assert code == 0
    texts = [line for _, line in lines.all]
    assert texts[0] == "one"
    assert texts[-1] == "no newline"
    assert sum(map(len, texts[1:-1])) == 3 * MAX_LINE_BYTES
    assert max(map(len, texts)) <= 2 * MAX_LINE_BYTES


def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started() -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
        "time.sleep(60)"
    )

    async def story() -> tuple[int, int]:
        lines = Lines()
        process = await ServiceProcess.start(python(code, stop_timeout_s=0.2), lines.log)
        await lines.any_came.wait()
        return await process.stop(), int(lines.all[0][1])

    exit_code, grandchild = asyncio.run(story())
    assert exit_code == -signal.SIGKILL
    assert is_gone(grandchild)


def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, time; from compose.die_with_parent import bound_to_this_process as bound\n"
            "print(subprocess.Popen(bound(['sleep', '60'])).pid, flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not is_gone(child, timeout_s=0)
    parent.kill()
    parent.wait(5)
    assert is_gone(child)


def test_a_program_that_does_not_exist_is_named() -> None:
    ended = subprocess.run(bound_to_this_process(["no-such-program"]), capture_output=True, text=True)
    assert ended.returncode == 127
    assert "cannot run no-such-program" in ended.stderr


def test_a_service_that_cannot_work_ends_the_stack_with_its_last_words() -> None:
    async def story(code: str, was_ready: bool) -> Lines:
        lines = Lines()
        events = StackEvents(lambda: None, lambda: was_ready)
        backoff = RestartBackoff(first_s=0.001, cap_s=0.001)
        service = KeptService(lambda: python(code), lines, events, backoff=backoff)  # type: ignore[arg-type]
        await service.start()
        try:
            async with asyncio.timeout(5):
                await service.keep()
        finally:
            await service.stop()
        return lines

    with pytest.raises(StackFailed, match="child: the key is wrong") as failed:
        asyncio.run(story("print('the key is wrong'); raise SystemExit(2)", was_ready=False))
    assert failed.value.exit_code == 2
    with pytest.raises(StackFailed, match="failed 5 times in a row; its last words: boom"):
        asyncio.run(story("print('boom'); raise SystemExit(1)", was_ready=False))
    with pytest.raises(TimeoutError):  # a stack that has served is kept up whatever happens
        asyncio.run(_within(0.5, story("raise SystemExit(2)", was_ready=True)))


async def _within(seconds: float, story) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(seconds):
        await story


def test_a_run_directory_has_one_owner(tmp_path: Path) -> None:
    one = RunDirectory.open(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        RunDirectory.open(tmp_path / "run")
    one.close()
    one.close()
    RunDirectory.open(tmp_path / "run").close()


def test_leftovers_of_a_dead_stack_go_and_its_secrets_stay(tmp_path: Path) -> None:
    one = RunDirectory.open(tmp_path / "run")
    secrets = one.secrets()
    for name in ("stack.json", "gateway.json"):
        (one.path / name).write_text("{}")
    one.socket_file(0).touch()
    os.close(one._lock)  # type: ignore[arg-type]  # as the kernel does when the owner is killed

    two = RunDirectory.open(tmp_path / "run")
    assert {path.name for path in two.path.iterdir()} == {"lock", "secrets.json", "s"}
    assert list(two.socket_directory.iterdir()) == []
    assert two.secrets() == secrets
    assert stat.S_IMODE((two.path / "secrets.json").stat().st_mode) == 0o600
    assert two.secrets("from the environment").pepper == "from the environment"
    kept = read_secrets(two.path)
    assert kept is not None
    assert kept.valkey_password == secrets.valkey_password
    two.close()


def test_socket_paths_fit_into_an_address_however_deep_the_directory(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 150)
    one = RunDirectory.open(deep)
    assert len(os.fsencode(one.socket_file(63))) <= MAX_SOCKET_PATH_BYTES
    assert stat.S_IMODE(one.socket_directory.stat().st_mode) == 0o700
    first_place = one.socket_directory
    os.close(one._lock)  # type: ignore[arg-type]  # killed
    two = RunDirectory.open(deep)
    assert two.socket_directory == first_place, "so that the next start cleans up"
    two.close()
    assert not first_place.exists()


def test_a_place_for_sockets_that_somebody_else_prepared_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 150)
    one = RunDirectory.open(deep)
    expected = one.socket_directory
    one.close()
    expected.symlink_to(tmp_path)
    try:
        two = RunDirectory.open(deep)
        assert two.socket_directory != expected
        two.close()
        assert tmp_path.is_dir()
    finally:
        expected.unlink()
