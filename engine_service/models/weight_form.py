"""In what form the matrices of a model are kept, decided once, when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.build import INSTRUCTION_SET_VARIABLE, default_instruction_set
from kernels.cpu.packed_linear import LinearLibrary, PackedWeight, pack_weight
from kernels.cpu.team import Team
from kernels.cpu.weight_memory import WeightMemory
from kernels.dispatch import BackEndUnavailable
from kernels.quantized_reference import QuantizedWeight, in_one_format, quantize_weight, stacked
from shared.config import ModelConfig
from shared.errors import ConfigError

_LOG = logging.getLogger(__name__)

StoredMatrix = Tensor | QuantizedWeight
"""`[out, in]`, as a file has it."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedStack:
    """q, k and v where a file has them in several formats: packed parts, one below the other."""

    parts: tuple[PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_outputs for part in self.parts), self.parts[0].num_inputs

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Matrix = Tensor | PackedWeight | PackedStack
"""`[out, in]`, as a model computes with it."""


class WeightForm(Protocol):
    @property
    def dtype(self) -> torch.dtype:
        """Of what is no matrix, and of matrices that are kept in floats."""

    @property
    def rounds(self) -> bool:
        """Whether everything becomes int8."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether quantised matrices are wanted as they are. Otherwise `matrix` gets floats only."""

    def matrix(self, name: str, parts: Sequence[StoredMatrix], *, is_gated: bool) -> Matrix:
        """The parts as one matrix, one below the other. Floats are of `dtype`, no two of them neighbours.

        `is_gated`: for a layer with a gate, whose halves are gate and up. `name` is for the log.
        """


@dataclass(frozen=True, slots=True)
class FloatForm:
    """Floats; with `rounds`, of the values that int8 weights have, for machines without the C++ kernels."""

    dtype: torch.dtype
    rounds: bool = False

    @property
    def keeps_blocks(self) -> bool:
        return self.rounds

    def matrix(self, name: str, parts: Sequence[StoredMatrix], *, is_gated: bool) -> Matrix:
        if not self.rounds:
            (values,) = parts
            assert isinstance(values, Tensor), "blocks are not kept in this form"
            return values
        return _rounded(parts).dequantized().to(self.dtype)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Packed for the C++ kernels: blocks and floats as a file has them, all in int8, or all in float32."""

    library: LinearLibrary
    team: Team
    rounds: bool = False
    keeps_blocks: bool = True
    dtype: torch.dtype = torch.float32
    _memory: WeightMemory = field(default_factory=WeightMemory)

    def matrix(self, name: str, parts: Sequence[StoredMatrix], *, is_gated: bool) -> Matrix:
        pieces = [_rounded(parts)] if self.rounds else _pieces(parts)
        if is_gated and len(pieces) > 1:  # rows of both lie side by side, which takes one format
            _LOG.info("%s is kept in float32: its halves are stored in different formats", name)
            pieces = [_floats(pieces)]
        packed = [
            pack_weight(piece, is_gated=is_gated, team=self.team, memory=self._memory, library=self.library)
            for piece in pieces
        ]
        return packed[0] if len(packed) == 1 else PackedStack(tuple(packed))


def select_form(config: ModelConfig, num_threads: int) -> WeightForm:
    """As `config.quantization` says, as far as this machine can; whoever selects the operators warns.

    Raises ConfigError if the environment names an instruction set that nobody knows.
    """
    try:
        default_instruction_set()
    except ValueError as error:
        raise ConfigError(str(error), INSTRUCTION_SET_VARIABLE) from error
    dtype: torch.dtype = getattr(torch, config.dtype)
    rounds = config.quantization == "int8"
    if config.device != "cpu" or dtype != torch.float32:
        return FloatForm(dtype)
    try:
        library = LinearLibrary()
    except BackEndUnavailable:
        return FloatForm(dtype, rounds)
    keeps_blocks = config.quantization != "none"
    return PackedForm(library, Team(num_threads, library=library.library), rounds, keeps_blocks)


def _pieces(parts: Sequence[StoredMatrix]) -> Sequence[StoredMatrix]:
    """Exactly what the parts are, in one piece where neighbours have a format in common."""
    pieces: list[StoredMatrix] = []
    for part in parts:
        last = pieces[-1] if pieces else None
        alike = None
        if isinstance(last, QuantizedWeight) and isinstance(part, QuantizedWeight):
            alike = in_one_format([last, part])
        if alike is None:
            pieces.append(part)
        else:
            pieces[-1] = stacked(alike)
    return pieces


def _floats(parts: Sequence[StoredMatrix]) -> Tensor:
    return torch.cat([part if isinstance(part, Tensor) else part.dequantized() for part in parts])


def _rounded(parts: Sequence[StoredMatrix]) -> QuantizedWeight:
    """Bytes as they are, anything else rounded to them."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and (alike := in_one_format(quantized)) is not None:
        weight = stacked(alike)
        if not weight.format.has_minimums:
            return weight
    values = _floats(parts)
    return quantize_weight(values.float(), _format_of(values.shape[1]))


def _format_of(num_inputs: int) -> str:
    """The most exact one for this width. Of groups of 64 and of 32 those of 64 were no worse, and faster."""
    for group in (64, 32):
        if num_inputs % group == 0:
            return f"int8_group{group}"
    return "int8_channel"
