"""What bounds any server on this machine: reading memory, and multiply-accumulates that wait for nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent.with_name("cpu_ceilings.cpp")
READ_BYTES = 2**30
NUM_READS = 10
NUM_BURSTS = 60
ROUNDS_OF_BURST = 200_000
FMA_PER_ROUND = 80  # float32 multiply-accumulates of a thread, in AVX2
PAIR_SUMS_PER_ROUND = 128  # the same of int16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best of short bursts, with AVX2 instructions whatever else the CPU has."""

    read_gb_s: float
    float32_gmac_s: float
    int16_gmac_s: float


def measure_ceilings(num_threads: int) -> Ceilings | None:
    """None where they cannot be compiled: no compiler, or a CPU without AVX2."""
    with tempfile.TemporaryDirectory() as folder:
        library_file = Path(folder) / "ceilings.so"
        flags = ("-O2", "-mavx2", "-mfma", "-fopenmp", "-shared", "-fPIC")
        command = (os.environ.get("CXX", "c++"), *flags, str(SOURCE), "-o", str(library_file))
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        library = ctypes.CDLL(str(library_file))
    memory = np.ones(READ_BYTES, np.uint8)
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(READ_BYTES)
    rounds = ctypes.c_int64(ROUNDS_OF_BURST)
    in_all = ROUNDS_OF_BURST * num_threads
    read_s = _best_s(lambda: library.ceiling_read(address, size, num_threads), NUM_READS)
    fma_s = _best_s(lambda: library.ceiling_fma(rounds, num_threads), NUM_BURSTS)
    pair_sum_s = _best_s(lambda: library.ceiling_pair_sum(rounds, num_threads), NUM_BURSTS)
    return Ceilings(
        read_gb_s=READ_BYTES / read_s / 1e9,
        float32_gmac_s=FMA_PER_ROUND * in_all / fma_s / 1e9,
        int16_gmac_s=PAIR_SUMS_PER_ROUND * in_all / pair_sum_s / 1e9,
    )


def _best_s(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best
