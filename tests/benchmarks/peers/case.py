"""The workloads, and which of their figures are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Unit = Literal["tok/s", "ms", "MiB", "s"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a measurement. `key` names it in `Measurement.figures`."""

    key: str
    title: str
    unit: Unit
    higher_is_better: bool


OUTPUT = Figure("output_tokens_per_s", "output", "tok/s", higher_is_better=True)
TOTAL = Figure("total_tokens_per_s", "total", "tok/s", higher_is_better=True)
PREFILL = Figure("prefill_tokens_per_s", "prefill", "tok/s", higher_is_better=True)
TTFT = Figure("ttft_p50_ms", "TTFT p50", "ms", higher_is_better=False)
TTFT_P95 = Figure("ttft_p95_ms", "TTFT p95", "ms", higher_is_better=False)
TPOT = Figure("tpot_p50_ms", "TPOT p50", "ms", higher_is_better=False)
ITL = Figure("itl_p50_ms", "ITL p50", "ms", higher_is_better=False)
WALL = Figure("wall_s", "wall", "s", higher_is_better=False)
MEMORY = Figure("peak_memory_mib", "peak memory", "MiB", higher_is_better=False)
LARGEST = Figure("largest_process_mib", "its largest process", "MiB", higher_is_better=False)
READY = Figure("ready_s", "start to ready", "s", higher_is_better=False)

WHOLE_LIFE = "whole life"
"""In place of a case's name: of a server from its start to its end."""

DECODING_FIGURES = (OUTPUT, TOTAL, TTFT, TTFT_P95, TPOT, ITL, WALL)
PREFILL_FIGURES = (PREFILL, TTFT, TTFT_P95, WALL)


@dataclass(frozen=True, slots=True)
class Case:
    """A closed loop of `concurrency` clients. Prompts differ but for their first `prefix_len` tokens."""

    name: str
    concurrency: int
    num_requests: int
    input_len: int  # distinct tokens of a prompt, on top of the prefix
    output_len: int
    prefix_len: int = 0
    figures: tuple[Figure, ...] = DECODING_FIGURES
    compared: tuple[Figure, ...] = (OUTPUT,)

    @property
    def prompt_len(self) -> int:
        return self.prefix_len + self.input_len

    @property
    def description(self) -> str:
        prompt = f"{self.input_len} in"
        if self.prefix_len:
            prompt = f"{self.prefix_len} tokens in common and {self.input_len} distinct in"
        return (
            f"concurrency {self.concurrency}, {prompt}, {self.output_len} out, {self.num_requests} requests"
        )


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("c1", 1, 6, 128, 64, compared=(TPOT, OUTPUT)),
        Case("c8", 8, 64, 128, 64, compared=(OUTPUT, TTFT)),
        Case("c32", 32, 64, 128, 64),
        Case("prefill512", 1, 5, 512, 1, figures=PREFILL_FIGURES, compared=(PREFILL,)),
        Case("shared", 8, 48, 64, 32, prefix_len=512, compared=(OUTPUT, TTFT)),
    )
}
