"""Paged attention against the ceilings of this machine: reading the cache, and multiply-accumulates.

    python -m tests.benchmarks.attention [--instruction-set avx2] [--threads 2] [--shapes 135M,1.5B]

Prints Markdown for docs/PERFORMANCE.md. Every layer of a model in turn, each with a cache of its own whose
blocks lie in random order, so that a row measures memory and not the caches. Times are the sums over
layers of the best of each one's repeats: what a quiet machine would take. "of ceiling" compares the products
that a causal mask leaves with float32 instructions that wait for nothing, "of reading" with reading the same
memory from front to back (ceilings.py); all in turns. A call from Python takes some 10 µs beside all that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.build import INSTRUCTION_SETS
from kernels.cpu.operators import CpuOperators
from kernels.kv_vectors import store_vectors
from tests.benchmarks.ceilings import Ceilings, machine

BLOCK_SIZE = 16
SECONDS_PER_CASE = 1.0
MIN_ROUNDS = 3
DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
# name -> (layers that are gone through, heads, KV heads, head_dim)
SHAPES = {"135M": (30, 9, 3, 64), "1.5B": (8, 12, 2, 128)}


@dataclass(frozen=True, slots=True)
class Case:
    num_seqs: int
    query_len: int
    context_len: int

    def __str__(self) -> str:
        what = "token" if self.query_len == 1 else f"{self.query_len} tokens"
        return f"{self.num_seqs} × {what} of {self.context_len}"

    @property
    def num_pairs(self) -> int:
        """Of a query token and a key that it sees."""
        before = self.context_len - self.query_len
        return self.num_seqs * self.query_len * (2 * before + self.query_len + 1) // 2


CASES = (
    Case(32, 1, 160),
    Case(8, 1, 160),
    Case(1, 1, 160),
    Case(8, 1, 2048),
    Case(1, 1, 4096),
    Case(1, 512, 512),
    Case(1, 128, 128),
    Case(1, 512, 4096),
)


@dataclass(frozen=True, slots=True)
class Layer:
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata


def make_layers(
    case: Case, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Iterator[Layer]:
    num_blocks = -(-case.context_len // BLOCK_SIZE)
    vectors = store_vectors(torch.randn(256, head_dim), dtype)
    query_start = torch.arange(case.num_seqs + 1, dtype=torch.int32) * case.query_len
    for _ in range(num_layers):
        keys, values = (
            vectors[torch.randint(len(vectors), (case.num_seqs * num_blocks, num_kv_heads, BLOCK_SIZE))]
            for _ in "kv"
        )
        order = torch.randperm(case.num_seqs * num_blocks, dtype=torch.int32)
        metadata = AttentionMetadata(
            query_start=query_start,
            context_lens=torch.full((case.num_seqs,), case.context_len, dtype=torch.int32),
            block_tables=order.view(case.num_seqs, num_blocks),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=case.query_len,
            max_context_len=case.context_len,
        )
        yield Layer(keys, values, metadata)


def best_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Of each call, all in turns."""
    best = [float("inf")] * len(calls)
    until = time.perf_counter() + SECONDS_PER_CASE
    num_rounds = 0
    while num_rounds < MIN_ROUNDS or time.perf_counter() < until:
        for index, call in enumerate(calls):
            began = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - began)
        num_rounds += 1
    return best


def print_shape(name: str, operators: CpuOperators, ceilings: Ceilings) -> None:
    num_layers, num_heads, num_kv_heads, head_dim = SHAPES[name]
    print(f"\n{name}: {num_heads} heads, {num_kv_heads} KV heads of {head_dim}\n")
    print("| tokens | cache | layers | ms | GMAC/s | of ceiling | GB/s | of reading |")
    print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for case, (dtype_name, dtype) in itertools.product(CASES, DTYPES.items()):
        # A long chunk measures arithmetic, for which some layers are enough.
        count = num_layers if case.query_len == 1 else 4
        layers = list(make_layers(case, count, num_kv_heads, head_dim, dtype))
        query = torch.randn(case.num_seqs * case.query_len, num_heads, head_dim)

        def attend(layer: Layer, query: Tensor = query) -> None:
            operators.paged_attention(query, layer.keys, layer.values, layer.metadata, 0.1)

        def read(layer: Layer) -> None:
            ceilings.read(layer.keys)
            ceilings.read(layer.values)

        times = best_times([partial(each, layer) for each in (attend, read) for layer in layers])
        attend_s, read_s = sum(times[:count]), sum(times[count:])
        ceilings.refresh()
        num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        read, share = num_bytes / attend_s / 1e9, read_s / attend_s
        gmac_s = 2 * case.num_pairs * num_heads * head_dim * count / attend_s / 1e9
        print(
            f"| {case} | {dtype_name} | {count} | {attend_s * 1e3:.2f} | {gmac_s:.1f} "
            f"| {gmac_s / ceilings.float_gmac_s:.0%} | {read:.1f} | {share:.0%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instruction-set", default="native", choices=sorted(INSTRUCTION_SETS))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    options = parser.parse_args()
    operators = CpuOperators(options.threads, instruction_set=options.instruction_set)
    ceilings = Ceilings(options.threads, options.instruction_set)
    print(f"{machine()}; {options.threads} threads; {options.instruction_set}")
    for name in options.shapes.split(","):
        print_shape(name, operators, ceilings)
    print(f"\nceiling: {ceilings.float_gmac_s:.0f} GMAC/s in float32")


if __name__ == "__main__":
    main()
