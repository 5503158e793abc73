"""`headrace up` with real processes: ready, crashes, the end, and two stacks side by side."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from compose.gateway_client import GatewayClient, GatewayError
from compose.run_directory import StackRecord, read_stack
from shared.identifiers import EngineId
from shared.processors import usable_processors

TIMEOUT_S = 40.0
DEATH_LIMIT_S = 5.0
SECRETS = ("HEADRACE_REDIS_URL", "HEADRACE_KEY_PEPPER", "HEADRACE_ADMIN_TOKEN")
CONFIG = """
[gateway]
drain_timeout_s = 5

[[models]]
name = "fake"
source = "fake:"
num_gpu_blocks_override = 64
max_model_len = 512
"""


class UpProcess:
    """One `headrace up` in a directory of its own."""

    def __init__(
        self, directory: Path, *arguments: str, config: str = CONFIG, redis_url: str | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "headrace.toml").write_text(config)
        self.run_directory = directory / "run"
        self._log = directory / "up.log"
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "compose.cli", "up"),
                    *("--config", str(directory / "headrace.toml"), "--run-dir", str(self.run_directory)),
                    *("--port", "0", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | ({"HEADRACE_REDIS_URL": redis_url} if redis_url else {}),
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ready(self) -> StackRecord:
        eventually(lambda: self.stack is not None or self.process.poll() is not None, self._describe)
        assert self.stack is not None, self.log
        return self.stack

    @property
    def stack(self) -> StackRecord | None:
        return read_stack(self.run_directory)

    def ended(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def _describe(self) -> str:
        return self.log


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., UpProcess]]:
    """Starts `headrace up`; the name of the directory, then its arguments. Kills what is left at the end."""
    started: list[UpProcess] = []

    def start(name: str = "a", *arguments: str, **options: str) -> UpProcess:
        started.append(UpProcess(tmp_path / name, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


def eventually(
    condition: Callable[[], object], describe: Callable[[], str] = str, timeout_s: float = TIMEOUT_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.02)


def pids_of(stack: StackRecord) -> list[int]:
    pids = stack.pids
    assert pids.gateway, "a ready stack has a gateway"
    assert pids.valkey, "this stack has its own Valkey"
    return [pids.gateway, pids.valkey, *pids.engines.values()]


def none_is_alive(pids: list[int]) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
    )


def answers(stack: StackRecord) -> bool:
    try:
        return GatewayClient(stack.url, stack.demo_key).time_to_first_token_s("fake") > 0
    except GatewayError:
        return False


def test_a_ready_stack_tells_scripts_and_people_how_to_use_it(up: Callable[..., UpProcess]) -> None:
    one = up("a", "--engines", "2")
    stack = one.ready()
    eventually(lambda: "is ready after" in one.log)

    assert answers(stack)
    assert stack.engine_ids == ["fake-0", "fake-1"]
    assert sorted(stack.pids.engines) == stack.engine_ids
    assert stack.pids.supervisor == one.process.pid
    assert stat.S_IMODE((one.run_directory / "stack.json").stat().st_mode) == 0o600
    assert stack.demo_key in one.log
    assert f"curl {stack.url}/v1/chat/completions" in one.log
    assert "time to first token: " in one.log
    for pid in pids_of(stack):  # other users can see command lines
        line = " ".join(psutil.Process(pid).cmdline())
        assert not any(secret in line for secret in (stack.demo_key, stack.admin_token, stack.redis_url))


def test_sigterm_ends_everything_and_leaves_nothing(up: Callable[..., UpProcess]) -> None:
    one = up()
    stack = one.ready()
    one.process.send_signal(signal.SIGTERM)

    assert one.ended() == 0, one.log
    assert none_is_alive(pids_of(stack))
    left = [path for path in one.run_directory.rglob("*") if path.is_socket()]
    assert left == []
    assert one.stack is None
    assert sorted(path.name for path in one.run_directory.iterdir()) == ["lock", "secrets.json", "valkey"]


def test_a_killed_engine_is_started_again(up: Callable[..., UpProcess]) -> None:
    one = up()
    before = one.ready()
    killed = before.pids.engines["fake-0"]
    os.kill(killed, signal.SIGKILL)

    eventually(
        lambda: (
            one.stack and one.stack.pids.engines.get("fake-0") not in (None, before.pids.engines["fake-0"])
        ),
        lambda: one.log,
    )
    eventually(lambda: answers(before), lambda: one.log)
    after = one.stack
    assert after is not None
    assert after.pids.gateway == before.pids.gateway
    assert "fake-0           | ended with signal 9" in one.log


def test_a_stack_json_that_cannot_be_written_does_not_end_the_stack(up: Callable[..., UpProcess]) -> None:
    process = up("a")
    stack = process.ready()
    file = process.run_directory / "stack.json"
    file.unlink()
    (file / "in the way").mkdir(parents=True)  # what is renamed onto it now fails, as on a full disk
    os.kill(stack.pids.engines[EngineId("fake-0")], signal.SIGKILL)
    eventually(lambda: "cannot be written" in process.log, lambda: process.log)
    eventually(lambda: answers(stack), lambda: process.log)
    assert process.process.poll() is None


def test_a_killed_gateway_comes_back_on_the_same_port(up: Callable[..., UpProcess]) -> None:
    one = up()
    stack = one.ready()
    assert stack.pids.gateway
    os.kill(stack.pids.gateway, signal.SIGKILL)

    eventually(lambda: answers(stack), lambda: one.log)


def test_a_killed_valkey_comes_back_with_the_keys(up: Callable[..., UpProcess]) -> None:
    one = up()
    stack = one.ready()
    assert stack.pids.valkey
    os.kill(stack.pids.valkey, signal.SIGKILL)

    eventually(lambda: one.stack and one.stack.pids.valkey not in (None, stack.pids.valkey), lambda: one.log)
    eventually(lambda: answers(stack), lambda: one.log)


def test_nothing_outlives_a_killed_supervisor_and_the_next_start_recovers(
    up: Callable[..., UpProcess],
) -> None:
    first = up("a", "--engines", "2")
    stack = first.ready()
    first.kill()

    eventually(lambda: none_is_alive(pids_of(stack)), timeout_s=DEATH_LIMIT_S)
    assert (first.run_directory / "stack.json").exists(), "a killed supervisor cannot have cleaned up"
    assert first.stack is None, "what it left behind is no stack"

    again = up("a", "--engines", "2")
    eventually(lambda: again.stack and again.stack.pids.supervisor == again.process.pid, lambda: again.log)
    assert again.stack is not None
    assert again.stack.demo_key == stack.demo_key, "keys survive"
    assert answers(again.stack)


def test_two_stacks_run_side_by_side_but_not_in_one_directory(up: Callable[..., UpProcess]) -> None:
    one, two = up("a"), up("b")
    first, second = one.ready(), two.ready()
    assert first.url != second.url
    assert answers(first)
    assert answers(second)
    with pytest.raises(GatewayError, match="401"):
        GatewayClient(second.url, first.demo_key).models()

    third = up("a")
    assert third.ended() == 2
    assert f"a running stack (pid {one.process.pid}) uses the run directory" in third.log
    assert answers(first)

    two.process.send_signal(signal.SIGTERM)
    assert two.ended() == 0
    assert answers(first)


def test_a_redis_that_is_there_is_used_and_its_engine_ids_are_respected(
    up: Callable[..., UpProcess], redis_url: str
) -> None:
    config = CONFIG + '\n[redis]\nnamespace = "shared-redis"\n'
    one = up("a", config=config, redis_url=redis_url)
    stack = one.ready()
    assert stack.pids.valkey is None
    assert stack.redis_url == redis_url
    assert answers(stack)

    rival = up("b", config=config, redis_url=redis_url)
    assert rival.ended() == 2
    assert "another stack in this Redis runs the engine 'fake-0'" in rival.log
    assert answers(stack)


def test_sockets_move_to_a_short_path_when_the_run_directory_is_deep(up: Callable[..., UpProcess]) -> None:
    one = up("d" * 120)
    stack = one.ready()
    sockets = [
        connection.laddr
        for connection in psutil.Process(stack.pids.engines["fake-0"]).net_connections("unix")
        if str(connection.laddr).endswith(".sock")
    ]
    assert sockets, "the engine listens on a unix socket"
    assert not str(sockets[0]).startswith(str(one.run_directory))
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 0
    assert not Path(str(sockets[0])).parent.exists()


@pytest.mark.parametrize(
    ("config", "arguments", "complaint"),
    [
        (
            CONFIG + "max_num_seq = 4\n",
            (),
            "'models.0.max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        (CONFIG, ("--engines", "65"), "models.0.engines"),
        (CONFIG, ("--model", "fakee"), "did you mean 'fake'?"),
        (CONFIG.replace("fake:", "/nowhere/model.gguf"), (), "/nowhere/model.gguf"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    up: Callable[..., UpProcess], config: str, arguments: tuple[str, ...], complaint: str
) -> None:
    one = up("a", *arguments, config=config)

    assert one.ended() == 2, one.log
    assert complaint in one.log
    assert "Traceback" not in one.log


def test_a_port_in_use_is_told_before_anything_starts(up: Callable[..., UpProcess]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = up("a", "--port", str(port))
        assert one.ended() == 2
    assert f"cannot listen on 127.0.0.1:{port}" in one.log


def test_a_second_signal_stops_at_once(up: Callable[..., UpProcess]) -> None:
    one = up()
    stack = one.ready()
    assert stack.pids.gateway
    os.kill(stack.pids.gateway, signal.SIGSTOP)  # would take the whole drain limit
    one.process.send_signal(signal.SIGINT)
    eventually(lambda: "once more to stop at once" in one.log)
    one.process.send_signal(signal.SIGINT)

    started_at = time.monotonic()
    assert one.ended() == 130
    assert time.monotonic() - started_at < DEATH_LIMIT_S
    assert none_is_alive(pids_of(stack))


@pytest.mark.skipif(len(usable_processors()) < 2, reason="one processor only")
def test_each_engine_keeps_to_its_processors(up):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    config = CONFIG + f'engines = 2\ncpus = ["{second}", "{first}"]\n'
    stack = up("a", config=config).ready()
    kept = [os.sched_getaffinity(stack.pids.engines[f"fake-{number}"]) for number in (0, 1)]
    assert kept == [{second}, {first}]


def test_processors_that_an_engine_may_not_use_end_the_start(up):
    process = up("a", config=CONFIG + 'cpus = ["99999"]\n')
    assert process.ended() != 0
    assert "may not run on the processors 99999" in process.log
