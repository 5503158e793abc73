"""The matrices that a decoder multiplies with: floats by torch, packed ones by the C++ kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from engine_service.models.weight_form import Matrix
from kernels.cpu.packed_linear import ActivationBits, LinearLibrary, PackedLinear, PackedWeight
from kernels.cpu.team import Team
from kernels.operators import Operators
from shared.config import ModelConfig

Activation = Literal["silu", "gelu_tanh"]
Linear = Callable[[Tensor], Tensor]
"""`[num_rows, in]` to `[num_rows, out]`, a new tensor."""
Lookup = Callable[[Tensor], Tensor]
"""Row numbers, int64 `[num_rows]`, to these rows of a matrix, a new tensor."""


class Linears(Protocol):
    """Makes the layers of one model. What a layer is made of need not be kept by others for it."""

    def plain(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        """`x @ weight.T + bias`; weight `[out, in]`."""

    def gated(self, weight: Matrix, bias: Tensor | None, activation: Activation) -> Linear:
        """`activation(g) * u` of the halves g and u of what `plain` gives, gate first."""

    def lookup(self, weight: Matrix) -> Lookup:
        """Rows of an embedding."""


class DenseLinears:
    """By torch, in the type of the weights."""

    def __init__(self, operators: Operators) -> None:
        self._gates: dict[Activation, Linear] = {
            "silu": operators.silu_and_mul,
            "gelu_tanh": operators.gelu_tanh_and_mul,
        }

    def plain(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        return _Dense(_floats(weight), bias)

    def gated(self, weight: Matrix, bias: Tensor | None, activation: Activation) -> Linear:
        gate, dense = self._gates[activation], _Dense(_floats(weight), bias)
        return lambda x: gate(dense(x))

    def lookup(self, weight: Matrix) -> Lookup:
        table = _floats(weight)
        return lambda rows: embedding(rows, table)


def _floats(weight: Matrix) -> Tensor:
    assert isinstance(weight, Tensor), "packed weights need the kernels that they were packed for"
    return weight


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Layers of one input, whose results become one row."""

    layers: tuple[PackedLinear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


class CpuLinears(DenseLinears):
    """Packed matrices by the C++ kernels, with integer activations (kernels/quantized_reference.py).

    `activation_bits`: with 4-bit weights; with those of 8 bits, activations have 16.
    """

    def __init__(self, operators: Operators, activation_bits: ActivationBits) -> None:
        super().__init__(operators)
        self._activation_bits = activation_bits
        self._library: LinearLibrary | None = None  # built where there is something packed
        self._team: Team | None = getattr(operators, "team", None)

    def plain(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, Tensor):
            return super().plain(weight, bias)
        if isinstance(weight, PackedWeight):
            return self._packed(weight, bias)
        widths = [part.num_outputs for part in weight.parts]
        biases = [None] * len(widths) if bias is None else torch.split(bias, widths)
        return SideBySide(tuple(map(self._packed, weight.parts, biases)))

    def gated(self, weight: Matrix, bias: Tensor | None, activation: Activation) -> Linear:
        if isinstance(weight, Tensor):
            return super().gated(weight, bias, activation)
        assert isinstance(weight, PackedWeight), "gate and up have one format"
        return self._packed(weight, bias, activation)

    def lookup(self, weight: Matrix) -> Lookup:
        if isinstance(weight, Tensor):
            return super().lookup(weight)
        assert isinstance(weight, PackedWeight), "an embedding has one format"
        return self._packed(weight).rows

    def _packed(
        self, weight: PackedWeight, bias: Tensor | None = None, activation: Activation | None = None
    ) -> PackedLinear:
        self._library = self._library or LinearLibrary()
        return PackedLinear(
            weight,
            bias,
            gate=activation,
            activation_bits=self._activation_bits,
            team=self._team,
            library=self._library,
        )


def select_linears(config: ModelConfig, operators: Operators) -> Linears | None:
    """What multiplies with weights of whatever form `select_form` has chosen; None: torch."""
    if config.device != "cpu":
        return None
    return CpuLinears(operators, 16 if config.activation_dtype == "int16" else 8)
