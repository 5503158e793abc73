"""The linear layers of the CPU kernels against the ceilings of this machine and against torch, side by side.

    python -m tests.benchmarks.kernels [--instruction-set avx2] [--threads 2] [--formats float32,int4_group32]

Prints Markdown for docs/PERFORMANCE.md. Every layer of a model in turn, so that one row measures memory and
not a cache; all formats in turn, so that they share what else the machine does. Times are the sums over
layers of the best of each layer's repeats: what a quiet machine would take. "of ceiling" is the share of
what the machine multiplies with instructions that wait for nothing (in float32, int16 or int8: ceilings.py);
"of reading" of the rate at which the same memory is read by instructions that do nothing else. torch may
use more than AVX2 unless MKL_ENABLE_INSTRUCTIONS=AVX2 and ONEDNN_MAX_CPU_ISA=AVX2 are set.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kernels.cpu.build import INSTRUCTION_SETS, default_instruction_set
from kernels.cpu.packed_linear import FLOAT_FORMATS, Gate, LinearLibrary, PackedLinear
from kernels.cpu.team import Team
from kernels.cpu.weight_memory import WeightMemory
from kernels.quantized_reference import FORMATS
from tests.benchmarks.ceilings import Ceilings, machine

FLOATS = tuple(each.name for each in FLOAT_FORMATS.values())
DEFAULT_FORMATS = ("float32", "bfloat16", "int8_group64", "int8_group32", "int4_group32/16", "int4_group32/8")
"""Behind the stroke: the bits of activations, 16 if there is none."""
ROWS = (1, 4, 8, 16, 32, 128, 512)
SECONDS_PER_CASE = 0.5
MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    num_outputs: int
    num_inputs: int
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    num_layers: int
    shapes: tuple[Shape, ...]


MODELS = (
    Model(
        "135M layers",
        30,
        (Shape(960, 576), Shape(576, 576), Shape(3072, 576, "silu"), Shape(576, 1536)),
    ),
    Model("135M head", 2, (Shape(49152, 576),)),
    Model(
        "1.5B layers",
        3,
        (Shape(2048, 1536), Shape(1536, 1536), Shape(17920, 1536, "silu"), Shape(1536, 8960)),
    ),
)
"""SmolLM2-135M, and three layers of a Qwen2 of 1.5 B."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Layers:
    """Of one model in one format."""

    format_name: str
    memory: tuple[Tensor, ...]
    runs: tuple[Callable[[Tensor], object], ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.memory)


def best_s(cases: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Seconds of all calls of a case, one after the other: the sum of each call's best."""
    best = {name: [float("inf")] * len(calls) for name, calls in cases.items()}
    until = time.perf_counter() + SECONDS_PER_CASE * len(cases)
    num_rounds = 0
    while time.perf_counter() < until or num_rounds < MIN_ROUNDS:
        for name, calls in cases.items():
            for index, call in enumerate(calls):
                began = time.perf_counter()
                call()
                best[name][index] = min(best[name][index], time.perf_counter() - began)
        num_rounds += 1
    return {name: sum(seconds) for name, seconds in best.items()}


def layers_of(model: Model, formats: Sequence[str], team: Team, library: LinearLibrary) -> list[Layers]:
    """torch's first. All lie in memory of the same kind: the same chance for all."""
    shapes = model.shapes * model.num_layers
    memory = WeightMemory()
    weights = []
    for shape in shapes:
        room = memory.allocate(shape.num_outputs * shape.num_inputs * 4).view(torch.float32)
        weights.append(room.view(shape.num_outputs, shape.num_inputs).normal_(std=shape.num_inputs**-0.5))
    dense = [
        _gated(weight) if shape.gate else _dense(weight)
        for weight, shape in zip(weights, shapes, strict=True)
    ]
    all_layers = [Layers("torch float32", tuple(weights), tuple(dense))]
    for format_name in formats:
        weight_name, _, bits = format_name.partition("/")
        packed = tuple(
            PackedLinear.from_float(
                weight,
                weight_name,
                gate=shape.gate,
                activation_bits=8 if bits == "8" else 16,
                team=team,
                memory=memory,
                library=library,
            )
            for weight, shape in zip(weights, shapes, strict=True)
        )
        all_layers.append(Layers(format_name, tuple(each.packed for each in packed), packed))
    return all_layers


def _dense(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, weight)


def _gated(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        gate, up = linear(x, weight).chunk(2, dim=-1)
        return silu(gate) * up

    return run


def print_model(
    model: Model,
    formats: Sequence[str],
    all_rows: Sequence[int],
    team: Team,
    library: LinearLibrary,
    top: Ceilings,
) -> None:
    all_layers = layers_of(model, formats, team, library)
    widths = [shape.num_inputs for shape in model.shapes * model.num_layers]
    num_weights = sum(shape.num_outputs * shape.num_inputs for shape in model.shapes) * model.num_layers
    reading = best_s({each.format_name: [_reading(top, part) for part in each.memory] for each in all_layers})
    print(f"\n{model.name}: {num_weights / 1e6:.0f} M weights\n")
    print("| rows | format | ms | GMAC/s | of ceiling | GB/s | of reading |")
    print("|---:|---|---:|---:|---:|---:|---:|", flush=True)
    for num_rows in all_rows:
        inputs = {width: torch.randn(num_rows, width) for width in set(widths)}
        seconds = best_s(
            {
                each.format_name: [
                    _call(run, inputs[width]) for run, width in zip(each.runs, widths, strict=True)
                ]
                for each in all_layers
            }
        )
        top.refresh()
        for each in all_layers:
            taken = seconds[each.format_name]
            rate = num_weights * num_rows / taken / 1e9
            ceiling = _ceiling(top, each.format_name)
            print(
                f"| {num_rows} | {each.format_name} | {taken * 1e3:.2f} | {rate:.1f} | {rate / ceiling:.0%} "
                f"| {each.num_bytes / taken / 1e9:.1f} | {reading[each.format_name] / taken:.0%} |",
                flush=True,
            )


def _ceiling(top: Ceilings, format_name: str) -> float:
    if format_name in ("torch float32", *FLOATS):
        return top.float_gmac_s
    return top.quads_gmac_s if format_name.endswith("/8") else top.integer_gmac_s


def _reading(top: Ceilings, part: Tensor) -> Call:
    return lambda: top.read(part)


def _call(run: Callable[[Tensor], object], x: Tensor) -> Call:
    return lambda: run(x)


def print_ceilings(top: Ceilings, instruction_set: str, num_threads: int) -> None:
    print(f"{machine()}; {num_threads} thread(s), instruction set {instruction_set}\n")
    print("| ceiling | rate |")
    print("|---|---:|")
    for num_bytes in (64 << 20, 1 << 30):
        print(f"| read {num_bytes >> 20} MiB | {top.read_gb_s(num_bytes):.1f} GB/s |")
    print(f"| float32 multiply-accumulate | {top.float_gmac_s:.0f} GMAC/s |")
    print(f"| int16 sums of pairs | {top.pairs_gmac_s:.0f} GMAC/s |")
    print(f"| int8 sums of quads | {top.quads_gmac_s:.0f} GMAC/s |")
    if top.amx_gmac_s:
        print(f"| int16 with int8 by AMX | {top.amx_gmac_s:.0f} GMAC/s |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers against their ceilings.")
    parser.add_argument(
        "--instruction-set", default=default_instruction_set(), choices=sorted(INSTRUCTION_SETS)
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    known = ", ".join((*FLOATS, *FORMATS))
    parser.add_argument(
        "--formats",
        default=",".join(DEFAULT_FORMATS),
        help=f"{known}; int4_group32/8 is with 8-bit activations",
    )
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = LinearLibrary(options.instruction_set)
    team = Team(options.threads, library=library.library)
    top = Ceilings(options.threads, options.instruction_set)
    print_ceilings(top, options.instruction_set, options.threads)
    all_rows = [int(number) for number in options.rows.split(",")]
    for model in MODELS:
        if model.name in options.models.split(","):
            print_model(model, options.formats.split(","), all_rows, team, library, top)


if __name__ == "__main__":
    main()
