"""The quantised linear layers against torch's float32 and against the ceilings of this machine, side by side.

    python -m tests.benchmarks.kernels [--instruction-set avx2] [--threads 2] [--formats int8_group32,...]

Every layer of a model in turn, so that one row measures memory and not a cache. The best time is the sum
over calls of the best of each call's repeats (what a quiet machine would take); the median is that of whole
rounds. "of reading" compares with reading the same memory, "of pair sums" with vpmaddwd and vpaddd in AVX2
registers that wait for nothing; both are best bursts of the same run. torch may use more than AVX2 unless
MKL_ENABLE_INSTRUCTIONS=AVX2 is set.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.cpu.build import INSTRUCTION_SETS
from kernels.cpu.packed_linear import LinearLibrary, PackedLinear
from kernels.cpu.team import Team
from kernels.cpu.weight_memory import WeightMemory
from kernels.quantized_reference import FORMATS

# name -> (layers, [(outputs, inputs)])
MODELS = {
    "135M layers": (30, [(960, 576), (576, 576), (3072, 576), (576, 1536)]),
    "135M head": (2, [(49152, 576)]),
    "1.5B layers": (3, [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)]),
}
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
SECONDS_PER_CASE = 1.0
MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Ceilings:
    fma_gmac_s: float
    pair_sum_gmac_s: float


class CeilingProbe:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        source = Path(__file__).with_name("cpu_ceilings.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "ceilings.so"
            compiler = os.environ.get("CXX", "c++")
            command = [
                compiler,
                "-O2",
                "-mavx2",
                "-mfma",
                "-fopenmp",
                "-shared",
                "-fPIC",
                str(source),
                "-o",
                str(library),
            ]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(library))
        self._best = Ceilings(0, 0)

    def read_s(self, parts: Sequence[Tensor]) -> float:
        """Seconds to read each of them once, one after the other, and nothing else."""
        threads = self._num_threads
        calls = [
            lambda part=part: self._library.ceiling_read(
                ctypes.c_void_p(part.data_ptr()), ctypes.c_int64(part.nbytes), threads
            )
            for part in parts
        ]
        return time_calls(calls)[0]

    def measure(self) -> Ceilings:
        """The best so far, after some more bursts."""
        threads, rounds = self._num_threads, 50_000
        fma = (
            80
            * rounds
            * threads
            / _best_s(lambda: self._library.ceiling_fma(ctypes.c_int64(rounds), threads))
        )
        pair = (
            128
            * rounds
            * threads
            / _best_s(lambda: self._library.ceiling_pair_sum(ctypes.c_int64(rounds), threads))
        )
        best = self._best
        self._best = Ceilings(
            max(best.fma_gmac_s, fma / 1e9),
            max(best.pair_sum_gmac_s, pair / 1e9),
        )
        return self._best


def _best_s(call: Callable[[], object], repeats: int = 30) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def time_calls(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Seconds of a round of all calls: the sum of each call's best, and the median round."""
    best = [float("inf")] * len(calls)
    rounds: list[float] = []
    until = time.perf_counter() + SECONDS_PER_CASE
    while time.perf_counter() < until or len(rounds) < MIN_ROUNDS:
        round_began = began = time.perf_counter()
        for index, call in enumerate(calls):
            call()
            ended = time.perf_counter()
            best[index] = min(best[index], ended - began)
            began = ended
        rounds.append(began - round_began)
    return sum(best), statistics.median(rounds)


def print_model(
    name: str,
    formats: Sequence[str],
    all_rows: Sequence[int],
    num_threads: int,
    library: LinearLibrary,
    probe: CeilingProbe,
) -> None:
    num_layers, shapes = MODELS[name]
    weights = [torch.randn(outputs, inputs) for _ in range(num_layers) for outputs, inputs in shapes]
    products = sum(weight.numel() for weight in weights)
    memory = WeightMemory()  # also below the float32 weights: the same chance for both
    team = Team(num_threads, library=library.library)
    weights = [memory.allocate(w.nbytes).view(torch.float32).view(w.shape).copy_(w) for w in weights]
    packed = {
        format_name: [
            PackedLinear.from_float(w, format_name, team=team, memory=memory, library=library)
            for w in weights
        ]
        for format_name in formats
    }
    print(f"\n{name}: {products / 1e6:.0f} M weights, {num_threads} thread(s)\n", flush=True)
    print("| rows | layer | best ms | median ms | GMAC/s | of pair sums | GB/s | of reading |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for num_rows in all_rows:
        inputs = {width: torch.randn(num_rows, width) for width in {weight.shape[1] for weight in weights}}
        cases: dict[str, tuple[list[Tensor], list[Callable[[], Tensor]]]] = {
            "torch float32": (weights, [_float_call(inputs[w.shape[1]], w) for w in weights])
        }
        for format_name, layers in packed.items():
            calls = [_packed_call(inputs[layer.num_inputs], layer) for layer in layers]
            cases[format_name] = ([layer.packed for layer in layers], calls)
        ceilings = probe.measure()
        for case, (memory_parts, calls) in cases.items():
            best_s, median_s = time_calls(calls)
            read_s = probe.read_s(memory_parts)
            num_bytes = sum(part.nbytes for part in memory_parts)
            macs, read = products * num_rows / best_s / 1e9, num_bytes / best_s / 1e9
            print(
                f"| {num_rows} | {case} | {best_s * 1e3:.2f} | {median_s * 1e3:.2f} | {macs:.1f} "
                f"| {macs / ceilings.pair_sum_gmac_s:.0%} | {read:.1f} | {read_s / best_s:.0%} |",
                flush=True,
            )
    print(f"\nceilings: {probe.measure()}", flush=True)


def _float_call(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return lambda: linear(x, weight)


def _packed_call(x: Tensor, layer: PackedLinear) -> Callable[[], Tensor]:
    return lambda: layer(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers against their ceilings.")
    parser.add_argument("--instruction-set", default="native", choices=sorted(INSTRUCTION_SETS))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library, probe = LinearLibrary(options.instruction_set), CeilingProbe(options.threads)
    for name in options.models.split(","):
        rows = [int(number) for number in options.rows.split(",")]
        print_model(name, options.formats.split(","), rows, options.threads, library, probe)


if __name__ == "__main__":
    main()
