"""How long an engine takes from its process's start until it is ready, and the memory that it then holds.

    python -m tests.benchmarks.engine_start [--model SOURCE] [--rounds N]

The first round packs the weights unless an earlier run has left them (docs/MODELS.md); later ones map them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared.config import DEFAULT_MODEL_SOURCE

_READY = " serves "
_MIB = 1024  # the kernel counts in KiB


def start(model: str, socket: Path) -> str:
    """Raises RuntimeError with what the engine said if it does not come up."""
    command = [sys.executable, "-m", "compose.cli", "engine", "--model", model, "--bind", f"ipc://{socket}"]
    # Nobody listens there: an engine serves without a registry until it can be reached.
    environment = os.environ | {"HEADRACE_REDIS_URL": "redis://127.0.0.1:1"}
    started_s = time.perf_counter()
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if _READY in line:
                break
        else:
            raise RuntimeError("".join(said))
        took_s = time.perf_counter() - started_s
        found = _memory_mib(process.pid)
        process.terminate()
        process.communicate()
    return f"ready after {took_s:.2f} s; " + ", ".join(f"{name} {mib} MiB" for name, mib in found.items())


def _memory_mib(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    values = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines.splitlines())}
    wanted = {"Pss": "proportional", "Pss_Anon": "of its own", "Rss": "resident", "VmHWM": "at most"}
    return {told: int(values[name][0]) // _MIB for name, told in wanted.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL_SOURCE)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(flags.rounds):
            print(start(flags.model, Path(folder) / "engine.sock"), flush=True)


if __name__ == "__main__":
    main()
