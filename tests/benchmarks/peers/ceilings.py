"""What bounds any server on this machine: reading memory, and multiply-accumulates that wait for nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.cpu.build import cpu_model
from kernels.dispatch import BackEndUnavailable
from tests.benchmarks import ceilings

READ_BYTES = 2**30
_FLAGS = {"avx2", "fma"}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best of short bursts, with AVX2 instructions whatever else the CPU has."""

    read_gb_s: float
    float32_gmac_s: float
    int16_gmac_s: float
    int8_gmac_s: float  # with 4-bit weights


def measure_ceilings(num_threads: int) -> Ceilings | None:
    """None where they cannot be had: no compiler, or a CPU without AVX2."""
    if not set(cpu_model().split()) >= _FLAGS:
        return None
    try:
        top = ceilings.Ceilings(num_threads, "avx2")
    except BackEndUnavailable:
        return None
    return Ceilings(
        read_gb_s=top.read_gb_s(READ_BYTES),
        float32_gmac_s=top.float_gmac_s,
        int16_gmac_s=top.pairs_gmac_s,
        int8_gmac_s=top.quads_gmac_s,
    )
