"""Compiles the C++ operators for this machine, once; later starts load the library from a cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from kernels.dispatch import BackEndUnavailable

_FOLDER = Path(__file__).parent
# Not -ffast-math: the exponential in vector.h relies on float additions being done as written.
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
)
INSTRUCTION_SETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "native": ("-march=native",),
        "portable": (),  # what every machine of the architecture has
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx_vnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
        "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "avx512_vnni": (
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mavx512vnni",
            "-mfma",
            "-mf16c",
        ),
    }
)
"""Compiler flags by name. `native` is for this machine; the others are for tests and benchmarks of a path."""

_LOG = logging.getLogger(__name__)

INSTRUCTION_SET_VARIABLE = "HEADRACE_CPU_ISA"
"""In the environment: the instruction set of whoever names none, instead of `native`."""

_COMPILE_TIMEOUT_S = 300
_SCRATCH_PREFIX = "unfinished-"
_ELF_HEADER = struct.Struct("<4s36xQ10xHH2x")  # magic; the section table's offset, entry size and length


def default_instruction_set() -> str:
    """Raises ValueError if the environment names one that is not in INSTRUCTION_SETS."""
    name = os.environ.get(INSTRUCTION_SET_VARIABLE) or "native"
    if name not in INSTRUCTION_SETS:
        raise ValueError(f"{INSTRUCTION_SET_VARIABLE} is {name!r}; known: {', '.join(INSTRUCTION_SETS)}")
    return name


def built_library(instruction_set: str | None = None) -> Path:
    """The shared library of the sources beside this file. Raises BackEndUnavailable if it cannot be built.

    `instruction_set`: a name in INSTRUCTION_SETS; None: that of `default_instruction_set`. The file name
    holds a hash of sources, compiler flags and CPU, so that a cache that several machines share, or an old
    one, is never used by mistake.
    """
    flags = (*_FLAGS, *INSTRUCTION_SETS[instruction_set or default_instruction_set()])
    name = f"headrace-{_fingerprint(flags)}.so"
    folders = [_FOLDER / "build", user_cache_folder()]
    for folder in folders:
        if _is_whole(folder / name):
            return folder / name
    compiler = _compiler()
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=folder) as scratch:
                fresh = Path(scratch) / name
                _compile(compiler, flags, fresh)
                # Atomic: engines that start at once each build their own and the last one stays.
                fresh.replace(folder / name)
        except OSError:  # a read-only installation: try the next folder
            continue
        return folder / name
    raise BackEndUnavailable(
        f"cannot write the compiled CPU kernels to any of {', '.join(map(str, folders))}"
    )


def _remove_abandoned(folder: Path) -> None:
    """What a compilation left that was killed."""
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if time.time() - scratch.stat().st_mtime > 2 * _COMPILE_TIMEOUT_S:
                shutil.rmtree(scratch)


def _compiler() -> list[str]:
    """With what `CXX` adds to it, as in "ccache g++"."""
    for candidate in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        try:
            program, *options = shlex.split(candidate) or [""]
        except ValueError as error:
            raise BackEndUnavailable(f"CXX is {candidate!r}: {error}") from error
        if found := shutil.which(program):
            return [found, *options]
        if program and candidate == os.environ.get("CXX"):
            _LOG.warning("CXX is %r, and there is no such program; looking for another compiler", candidate)
    raise BackEndUnavailable("no C++ compiler found for the CPU kernels")


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.cpp"))


def _is_whole(library: Path) -> bool:
    """Whether it is there and not cut off, which would end the process when it is used.

    The table at the end of an ELF file (64 bits) lies where its header says; other formats are trusted.
    """
    try:
        with library.open("rb") as file:
            header = file.read(_ELF_HEADER.size)
            if not header.startswith(b"\x7fELF"):
                return bool(header)
            _, table, size, count = _ELF_HEADER.unpack(header)
            return bool(table + size * count <= os.fstat(file.fileno()).st_size)
    except (OSError, struct.error):
        return False


def _fingerprint(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join((*flags, cpu_model())).encode())
    for path in [*_sources(), *sorted(_FOLDER.glob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cpu_model() -> str:
    """Model and instruction sets: what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def user_cache_folder() -> Path:
    """For what was made once and could be made again, where it cannot lie beside what it was made from."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "headrace"
    try:
        return Path.home() / ".cache" / "headrace"
    except RuntimeError:  # a user without a home, as in some containers
        return _FOLDER / "build"


def _compile(compiler: Sequence[str], flags: tuple[str, ...], target: Path) -> None:
    run_compiler([*compiler, *flags], _sources(), target, ["-shared"])


def run_compiler(command: Sequence[str], sources: Iterable[Path], target: Path, link: Sequence[str]) -> None:
    """Compiles the sources beside each other and links them, with objects in the folder of `target`.

    `command` is the compiler and its flags, `link` what is added to link. Raises BackEndUnavailable with
    what the compiler says.
    """
    objects = {source: target.parent / f"{source.parent.name}-{source.stem}.o" for source in sources}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = [
            pool.submit(_run, [*command, "-c", str(source), "-o", str(to)]) for source, to in objects.items()
        ]
        for each in compiled:
            each.result()
    _run([*command, *link, *map(str, objects.values()), "-o", str(target)])


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BackEndUnavailable(f"compiling the CPU kernels took over {_COMPILE_TIMEOUT_S} s") from error
    except OSError as error:
        raise BackEndUnavailable(f"the C++ compiler {command[0]} does not run: {error}") from error
    if result.returncode != 0:
        said = result.stderr.strip()[-2000:] or f"it ended with {result.returncode} and said nothing"
        raise BackEndUnavailable(f"compiling the CPU kernels failed (`{' '.join(command)}`): {said}")
