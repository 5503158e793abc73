"""The gateway stays small: no torch, no transformers, up in a moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.stack import Stack

HEAVY = ("torch", "transformers", "triton", "numpy", "engine_service", "kernels")


def test_importing_the_gateway_loads_nothing_heavy():
    code = f"import sys, gateway.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_running_process_has_loaded_nothing_heavy_and_stays_below_150_mb(redis_url):
    with Stack(redis_url, fresh=True) as stack:
        stack.get("/metrics")
        process = stack.processes["gateway"]
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps
        status = Path(f"/proc/{process.pid}/status").read_text()
        [resident_kb] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
        print(f"resident: {resident_kb / 1024:.0f} MiB")
        assert resident_kb * 1024 < 150e6


def test_its_start_takes_a_few_seconds_of_a_core_at_most(redis_url):
    """Of processor time, since the machine is shared. The best of three."""
    with Stack(redis_url, fresh=True) as stack:
        times = []
        for number in range(3):
            stack.start_gateway(f"again-{number}")
            busy = psutil.Process(stack.processes[f"again-{number}"].pid).cpu_times()
            times.append(busy.user + busy.system)
        print(f"start to listening: {', '.join(f'{seconds:.2f} s' for seconds in times)}")
        assert min(times) < 3  # 1.4 on a slow machine; what is heavy takes more by itself
