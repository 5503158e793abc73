"""Keeps every server to what an AVX2 machine has, on a machine that has more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError

InstructionSet = Literal["native", "avx2"]
INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("native", "avx2")

SOURCE = Path(__file__).with_name("avx2_cpu.c")

# What the libraries themselves heed. By itself it is not enough (see avx2_cpu.c).
LIBRARY_LIMITS: Mapping[str, str] = {
    "HEADRACE_CPU_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    # The C library has chosen its copying loops before anything can be preloaded.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD",
}

_CHECK = "import ctypes, sys; sys.exit(not ctypes.CDLL(sys.argv[1]).sees_avx2_only())"


def environment_limits(instruction_set: InstructionSet, folder: Path) -> dict[str, str]:
    """Environment variables under which a program sees no wider CPU. Builds a library in `folder` for them.

    Raises ConfigError where that cannot be: then `avx2` would only be a wish.
    """
    if instruction_set == "native":
        return {}
    if not is_wider_than_avx2(Path("/proc/cpuinfo").read_text()):
        return dict(LIBRARY_LIMITS)
    library = _built(folder)
    limits = {**LIBRARY_LIMITS, "LD_PRELOAD": str(library)}
    check = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _CHECK, str(library)],
        env=os.environ | limits,
        capture_output=True,
        text=True,
        check=False,
    )
    if check.returncode != 0:
        reason = check.stderr.strip() or f"the check of it ended with {check.returncode}"
        raise ConfigError(f"this machine cannot be narrowed to AVX2: {reason}", "--isa")
    return limits


def is_wider_than_avx2(cpu_info: str) -> bool:
    """From the text of /proc/cpuinfo."""
    flags = next((line for line in cpu_info.splitlines() if line.startswith("flags")), "")
    return any(flag.startswith(("avx512", "amx", "avx_vnni", "avx10")) for flag in flags.split())


def _built(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library = folder.absolute() / "avx2_cpu.so"
    # initfirst: before libraries that ask the CPU in a constructor of theirs.
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-Wl,-z,initfirst"]
    try:
        subprocess.run(
            [*command, str(SOURCE), "-ldl", "-o", str(library)], check=True, capture_output=True, text=True
        )
    except OSError as error:
        raise ConfigError(f"needs a C compiler: {error}", "--isa") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{SOURCE.name} does not compile: {error.stderr.strip()}", "--isa") from error
    return library
