"""The benchmark against peers with real processes: servers that work, fail or stay, and a whole round."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.errors import ConfigError
from tests.benchmarks.peers import command
from tests.benchmarks.peers.contestant import Contestant, Launch
from tests.benchmarks.peers.foreign_load import ForeignLoad
from tests.benchmarks.peers.instruction_set import environment_limits, is_wider_than_avx2
from tests.benchmarks.peers.process_tree import MemorySampler, cpu_seconds, descendants
from tests.benchmarks.peers.server import ServerFailedError, running
from tests.models import write_tiny_llama
from tests.stack import wait_until

# Answers every path with 200, ignores SIGTERM, and has a child.
STUBBORN = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
open("child", "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def has_ended(pid: int) -> bool:
    """Also if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def python_server(script: str) -> Contestant:
    def run(launch: Launch) -> list[str]:
        return [sys.executable, "-c", script, str(launch.port)]

    return Contestant("a", "test", "1.0", command=run, health_path="/health")


def test_a_server_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.peers.server.STOP_TIMEOUT_S", 0.1)
    with running(python_server(STUBBORN), tmp_path / "a", 1, {}, ready_timeout_s=20) as server:
        child = int((tmp_path / "a" / "child").read_text())
        assert descendants(server.pid) == [server.pid, child]
        with MemorySampler(server.pid) as memory:
            peak = memory.peak()
        assert peak.tree_bytes > peak.largest_process_bytes > 2**20
        assert len(peak.by_process) == 2
    assert not Path(f"/proc/{server.pid}").exists()
    wait_until(lambda: has_ended(child), what="the end of the server's child")


def test_a_server_that_ends_before_it_is_ready_says_why(tmp_path: Path) -> None:
    broken = python_server("import sys; sys.exit('no such weights')")
    with (
        pytest.raises(ServerFailedError, match="ended with 1 before it was ready: no such weights"),
        running(broken, tmp_path / "a", 1, {}, ready_timeout_s=20),
    ):
        pytest.fail("it was never ready")


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    silent = python_server("print('loading', flush=True); import signal; signal.pause()")
    with (
        pytest.raises(ServerFailedError, match="not ready in time"),
        running(silent, tmp_path / "a", 1, {}, ready_timeout_s=0.5),
    ):
        pytest.fail("it was never ready")


BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_the_time_of_the_server_and_of_the_client_is_not_foreign() -> None:
    machine = {"busy_s": 1000.0, "clock_s": 0.0}
    with subprocess.Popen([sys.executable, "-c", BUSY + "time.sleep(600)"]) as server:
        try:
            load = ForeignLoad(server.pid, lambda: machine["busy_s"], lambda: machine["clock_s"])
            subprocess.run(
                [sys.executable, "-c", BUSY], check=True
            )  # the client: a child that was waited for
            while cpu_seconds(server.pid) < 0.25:  # in ticks, rounded down
                time.sleep(0.01)
            machine["busy_s"] += 0.3 + 0.3 + 2.0
            machine["clock_s"] += 10.0
            assert load.cores() == pytest.approx(0.2, abs=0.05)
        finally:
            server.kill()


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not is_wider_than_avx2(Path("/proc/cpuinfo").read_text()),
    reason="this CPU has nothing beyond AVX2",
)
def test_a_narrowed_program_sees_no_wider_cpu_and_its_children_see_none_either(tmp_path: Path) -> None:
    try:
        limits = environment_limits("avx2", tmp_path)
    except ConfigError as error:
        pytest.skip(str(error))
    script = (
        "import ctypes, faulthandler\n"
        "faulthandler.enable()\n"  # wants SIGSEGV for itself, by sigaction
        "handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)\n"
        "ctypes.CDLL(None).signal(11, handler)\n"  # and so do others, by signal
        f"print(ctypes.CDLL({limits['LD_PRELOAD']!r}).sees_avx2_only())"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", parent], env=os.environ | limits, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "1"


def test_a_round_of_the_whole_stack_ends_in_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_llama(tmp_path / "model", vocab_size=30_000, max_position_embeddings=1024)
    config = tmp_path / "tiny.toml"
    config.write_text(f'[[models]]\nname = "tiny"\nsource = "{tmp_path / "model"}"\n')
    folder = tmp_path / "results"
    arguments = f"--headrace-config tiny={config} --cases prefill512 --rounds 1 --tries 1"
    arguments += f" --peers-dir {tmp_path} --result-dir {folder} --output {tmp_path / 'report.md'}"
    assert command.main(arguments.split()) == command.EXIT_SUCCESS
    printed = capsys.readouterr().out.strip()
    assert printed == (tmp_path / "report.md").read_text().strip()
    assert "| headrace-tiny" in printed
    assert "llama takes no part" in printed
    results = json.loads((folder / "results.json").read_bytes())
    [attempt] = results["attempts"]
    assert attempt["client"]["total_input_tokens"] == 5 * 512
    assert attempt["figures"]["prefill_tokens_per_s"] > 0
    assert attempt["figures"]["peak_memory_mib"] > attempt["figures"]["largest_process_mib"] > 10
