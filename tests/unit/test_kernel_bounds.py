"""The C++ kernels under the compiler's sanitizers: no byte out of bounds, no race, nothing undefined."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.dispatch import BackEndUnavailable

FEWEST_CALLS = {"attention": 200, "linear": 500, "sampling": 400, "decoder": 20}


@pytest.mark.parametrize("checks", ["address,undefined", pytest.param("thread", marks=pytest.mark.soak)])
def test_the_sanitizers_find_nothing(tmp_path: Path, checks: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    kernels, bounds = Path(build.__file__).parent, Path(__file__).parent / "bounds"
    # Unoptimised: twice as quick to compile, and the checks are the same.
    flags = ["-O0", "-std=c++20", "-pthread", f"-fsanitize={checks}", "-fno-sanitize-recover=all"]
    cpu_info = Path("/proc/cpuinfo")
    has_avx2 = cpu_info.exists() and " avx2 " in cpu_info.read_text()
    flags += [*build.INSTRUCTION_SETS["avx2" if has_avx2 else "portable"], f"-I{kernels}", f"-I{bounds}"]
    sources = [*sorted(kernels.glob("*.cpp")), *sorted(bounds.glob("*.cpp"))]
    program = tmp_path / "bounds"
    try:
        build.run_compiler([compiler, *flags], sources, program, [])
    except BackEndUnavailable as error:
        if "sanitize" not in str(error) and "asan" not in str(error):
            raise
        pytest.skip(f"the compiler has no sanitizers: {error}")
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    calls = {name: int(count) for name, count in map(str.split, result.stdout.splitlines())}
    assert calls.keys() == FEWEST_CALLS.keys()
    assert all(calls[name] > fewest for name, fewest in FEWEST_CALLS.items())
