"""In what form the matrices of a model are kept, decided once, when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.packed_linear import LinearLibrary, PackedWeight, pack_weight
from kernels.cpu.team import Team
from kernels.cpu.weight_memory import WeightMemory
from kernels.dispatch import BackEndUnavailable
from kernels.quantized_reference import QuantizedWeight, in_one_format, quantize_weight, stacked
from shared.config import ModelConfig

_LOG = logging.getLogger(__name__)

StoredMatrix = Tensor | QuantizedWeight
"""`[out, in]`, as a file has it."""
Matrix = Tensor | PackedWeight
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
        """The parts as one matrix, one below the other. Floats are of `dtype`, and come in one part.

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
    """Packed for the C++ kernels: blocks as a file has them, or, with `rounds`, everything in int8."""

    library: LinearLibrary
    team: Team
    rounds: bool
    dtype: torch.dtype = torch.float32
    _memory: WeightMemory = field(default_factory=WeightMemory)

    @property
    def keeps_blocks(self) -> bool:
        return True

    def matrix(self, name: str, parts: Sequence[StoredMatrix], *, is_gated: bool) -> Matrix:
        weight = _rounded(parts) if self.rounds else _in_one_piece(name, parts)
        if isinstance(weight, Tensor):
            return weight
        return pack_weight(
            weight, is_gated=is_gated, team=self.team, memory=self._memory, library=self.library
        )


def select_form(config: ModelConfig, num_threads: int) -> WeightForm:
    """As `config.quantization` says, as far as this machine can; whoever selects the operators warns."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    rounds = config.quantization == "int8"
    if config.quantization == "none" or config.device != "cpu" or dtype != torch.float32:
        return FloatForm(dtype)
    try:
        library = LinearLibrary()
    except BackEndUnavailable:
        return FloatForm(dtype, rounds)
    return PackedForm(library, Team(num_threads, library=library.library), rounds)


def _in_one_piece(name: str, parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Exactly what the parts are: quantised where they have a format in common."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if not quantized:
        (values,) = parts
        return values
    if len(quantized) == len(parts) and (alike := in_one_format(quantized)) is not None:
        return alike[0] if len(alike) == 1 else stacked(alike)
    _LOG.info("%s is kept in float32: its parts are stored in different formats", name)
    return torch.cat([part if isinstance(part, Tensor) else part.dequantized() for part in parts])


def _rounded(parts: Sequence[StoredMatrix]) -> QuantizedWeight:
    """Bytes as they are, anything else rounded to them."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and (alike := in_one_format(quantized)) is not None:
        weight = stacked(alike)
        if not weight.format.has_minimums:
            return weight
    values = torch.cat([part if isinstance(part, Tensor) else part.dequantized() for part in parts])
    return quantize_weight(values.float(), _format_of(values.shape[1]))


def _format_of(num_inputs: int) -> str:
    """The most exact one for this width. Of groups of 64 and of 32 those of 64 were no worse, and faster."""
    for group in (64, 32):
        if num_inputs % group == 0:
            return f"int8_group{group}"
    return "int8_channel"
