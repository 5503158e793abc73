"""The C++ kernels under the compiler's sanitizers: no byte out of bounds, no race, nothing undefined."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.dispatch import BackEndUnavailable

FEWEST_CALLS = {"attention": 200, "linear": 500, "sampling": 400, "decoder": 20}


@pytest.mark.parametrize("checks", ["address,undefined", pytest.param("thread", marks=pytest.mark.soak)])
def test_the_sanitizers_find_nothing(checks: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    kernels, bounds = Path(build.__file__).parent, Path(__file__).parent / "bounds"
    # Unoptimised: twice as quick to compile, and the checks are the same.
    flags = ["-O0", "-std=c++20", "-pthread", f"-fsanitize={checks}", "-fno-sanitize-recover=all"]
    cpu_info = Path("/proc/cpuinfo")
    has_avx2 = cpu_info.exists() and " avx2 " in cpu_info.read_text()
    flags += [*build.INSTRUCTION_SETS["avx2" if has_avx2 else "portable"], f"-I{kernels}", f"-I{bounds}"]
    try:
        program = built_program([compiler, *flags], kernels, bounds, checks)
    except BackEndUnavailable as error:
        if "sanitize" not in str(error) and "asan" not in str(error):
            raise
        pytest.skip(f"the compiler has no sanitizers: {error}")
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    calls = {name: int(count) for name, count in map(str.split, result.stdout.splitlines())}
    assert calls.keys() == FEWEST_CALLS.keys()
    assert all(calls[name] > fewest for name, fewest in FEWEST_CALLS.items())


def built_program(command: list[str], kernels: Path, bounds: Path, checks: str) -> Path:
    """Kept beside the library of the kernels while the sources are the same: it takes a minute of a core.

    Raises BackEndUnavailable.
    """
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((command, version)).encode())
    for path in (path for folder in (kernels, bounds) for path in sorted(folder.glob("*.[ch]*"))):
        digest.update(path.name.encode() + path.read_bytes())
    folder = kernels / "build"
    folder.mkdir(exist_ok=True)
    kind = f"bounds-{checks.replace(',', '-')}"
    kept = folder / f"{kind}-{digest.hexdigest()[:16]}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
            program = Path(scratch) / "bounds"
            sources = [*sorted(kernels.glob("*.cpp")), *sorted(bounds.glob("*.cpp"))]
            build.run_compiler(command, sources, program, [])
            for older in folder.glob(f"{kind}-*"):
                older.unlink()
            program.replace(kept)
    return kept
