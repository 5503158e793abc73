"""What choosing the tokens of a step costs: by torch and numpy, and by the C++ kernels, side by side.

    python -m tests.benchmarks.sampling [--vocab 49152] [--threads 2] [--instruction-set avx2]

Milliseconds of one step, in which all rows ask for the same: the best of alternating rounds (what a quiet
machine would take). "torch" has one thread, as in an engine whose threads are the kernels' own. Logits are
normal with a deviation of 3: a nucleus of some hundred tokens, about as flat as those of a small model.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from engine_service.raw_logprobs import RawLogprobs
from engine_service.sampler import Sampler
from engine_service.sequence import Sequence
from kernels.cpu.build import INSTRUCTION_SETS, built_library
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.team import Team, loaded_library
from shared.sampling import SamplingParams
from tests.hand_scheduling import make_sequence

SECONDS_PER_CASE = 2.0
SECONDS_PER_TURN = 0.03
MIN_ROUNDS = 3
NUM_TOKENS = 160  # of each sequence so far
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "presence, frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, repetition_penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "top_p 0.9, logprobs 5": {"top_p": 0.9, "logprobs": 5},
}


def step(logits: torch.Tensor, sequences: list[Sequence], native: NativeSampling | None) -> None:
    """As a runner does it."""
    raw = RawLogprobs(logits, sequences, native)
    raw.of(Sampler([2], native).sample(logits, sequences))


def best_ms(
    logits: torch.Tensor, sequences: list[Sequence], ways: list[NativeSampling | None]
) -> list[float]:
    best = [float("inf")] * len(ways)
    until = time.perf_counter() + SECONDS_PER_CASE
    num_rounds = 0
    while time.perf_counter() < until or num_rounds < MIN_ROUNDS:
        for index, native in enumerate(ways):
            turn_ends = time.perf_counter() + SECONDS_PER_TURN
            while time.perf_counter() < turn_ends:
                fresh = logits.clone()  # as they come from the head: in a cache, and not yet penalised
                began = time.perf_counter()
                step(fresh, sequences, native)
                best[index] = min(best[index], (time.perf_counter() - began) * 1e3)
        num_rounds += 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampling by torch and by the C++ kernels.")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2, help="of the second team; the first is one")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--instruction-set", default="native", choices=sorted(INSTRUCTION_SETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = loaded_library(built_library(options.instruction_set))
    teams = [Team(num_threads, library=library) for num_threads in (1, options.threads)]
    ways = [None, *(NativeSampling(team, library=library) for team in teams)]
    print(f"vocabulary {options.vocab}, sequences of {NUM_TOKENS} tokens; best ms of a step\n")
    print(f"| rows | asked for | torch | C++, 1 thread | C++, {options.threads} threads | gain with 1 |")
    print("|---:|---|---:|---:|---:|---:|")
    for num_rows in map(int, options.rows.split(",")):
        logits = torch.randn(num_rows, options.vocab, generator=torch.Generator().manual_seed(1)) * 3
        for name, asked in CASES.items():
            params = [
                SamplingParams(**{"max_tokens": 99, "seed": row, "temperature": 0.8} | asked)
                for row in range(num_rows)
            ]
            tokens = list(range(5, 5 + NUM_TOKENS))
            sequences = [make_sequence(row, tokens, each, num_blocks=1) for row, each in enumerate(params)]
            for sequence in sequences:
                sequence.num_prompt_tokens = NUM_TOKENS // 2
            plain, alone, together = best_ms(logits, sequences, ways)
            figures = f"{plain:.2f} | {alone:.3f} | {together:.3f} | {plain / alone:.0f} ×"
            print(f"| {num_rows} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
