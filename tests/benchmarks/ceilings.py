"""What this machine can do at best: read memory, multiply and add. Beside it a kernel's time is judged."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from ctypes import c_int64, c_void_p
from pathlib import Path

from torch import Tensor

from kernels.cpu import build
from kernels.cpu.team import Team
from kernels.cpu.weight_memory import WeightMemory

_SECONDS_PER_BURST = 0.002
_REPEATS = 20


class Ceilings:
    """Measured in short bursts, of which the best so far counts: `refresh` from time to time.

    In the widest registers of an instruction set, a name in `kernels.cpu.build.INSTRUCTION_SETS` with AVX2 at
    least.
    """

    def __init__(self, num_threads: int, instruction_set: str) -> None:
        """Raises BackEndUnavailable where there is no compiler or it fails."""
        compiler = os.environ.get("CXX", "c++")
        kernels = Path(build.__file__).parent
        sources = [Path(__file__).with_name("cpu_ceilings.cpp"), kernels / "team.cpp"]
        flags = ["-O2", "-std=c++20", "-fPIC", "-pthread", f"-I{kernels}"]
        flags += build.INSTRUCTION_SETS[instruction_set]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ceilings.so"
            build.run_compiler([compiler, *flags], sources, path, ["-shared"])
            self._library = ctypes.CDLL(str(path))
        self._team = Team(num_threads, library=self._library)
        self._library.ceiling_read.argtypes = [c_void_p, c_void_p, c_int64]
        self._library.ceiling_read.restype = None
        self.float_gmac_s = 0.0
        """float32, fused multiply-add."""
        self.pairs_gmac_s = 0.0
        """int16, by the sums of pairs of products that vector registers have."""
        self.quads_gmac_s = 0.0
        """int8 with unsigned 4-bit numbers, whose sums of products 16 bits can hold for a while."""
        self.amx_gmac_s = 0.0
        """int16 with int8, each number in two halves; 0 without AMX."""
        self.refresh()

    @property
    def integer_gmac_s(self) -> float:
        """Of 16-bit activations with quantised weights, by whatever is quickest."""
        return max(self.pairs_gmac_s, self.amx_gmac_s)

    def refresh(self) -> None:
        self.float_gmac_s = max(self.float_gmac_s, self._burst("ceiling_float"))
        self.pairs_gmac_s = max(self.pairs_gmac_s, self._burst("ceiling_pairs"))
        self.quads_gmac_s = max(self.quads_gmac_s, self._burst("ceiling_quads"))
        self.amx_gmac_s = max(self.amx_gmac_s, self._burst("ceiling_amx"))

    def read(self, memory: Tensor) -> None:
        """Reads it once, and does nothing else."""
        self._library.ceiling_read(self._team.address, memory.data_ptr(), memory.nbytes)

    def read_gb_s(self, num_bytes: int) -> float:
        """The best rate of reading so much memory, which no cache may have."""
        memory = WeightMemory().allocate(num_bytes).fill_(1)
        best = float("inf")
        for _ in range(_REPEATS):
            began = time.perf_counter()
            self.read(memory)
            best = min(best, time.perf_counter() - began)
        return num_bytes / best / 1e9

    def _burst(self, name: str) -> float:
        function = getattr(self._library, name)
        function.argtypes, function.restype = [c_void_p, c_int64], c_int64
        rounds, best = 1000, 0.0
        for _ in range(_REPEATS):
            began = time.perf_counter()
            done = function(self._team.address, rounds)
            taken = time.perf_counter() - began
            best = max(best, done / taken / 1e9)
            rounds = max(1, int(rounds * min(2.0, _SECONDS_PER_BURST / taken)))
        return best


def machine() -> str:
    """The processor and how many of it there are, in words."""
    names = [line for line in build.cpu_model().splitlines() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else "an unknown processor"
    return f"{name}, {os.cpu_count()} cores"
