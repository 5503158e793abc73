"""The matrices that a decoder multiplies with: floats by torch, packed ones by the C++ kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torch.nn.functional import embedding, linear

from engine_service.models.weight_form import Matrix
from kernels.cpu.packed_linear import LinearLibrary, PackedLinear, PackedWeight
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


class CpuLinears(DenseLinears):
    """Packed matrices by the C++ kernels, with 16-bit activations (kernels/quantized_reference.py)."""

    def __init__(self, operators: Operators) -> None:
        super().__init__(operators)
        self._library: LinearLibrary | None = None  # built where there is something packed
        self._team: Team | None = getattr(operators, "team", None)

    def plain(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, Tensor):
            return super().plain(weight, bias)
        return self._packed(weight, bias)

    def gated(self, weight: Matrix, bias: Tensor | None, activation: Activation) -> Linear:
        if isinstance(weight, Tensor):
            return super().gated(weight, bias, activation)
        return self._packed(weight, bias, activation)

    def lookup(self, weight: Matrix) -> Lookup:
        return super().lookup(weight) if isinstance(weight, Tensor) else self._packed(weight).rows

    def _packed(
        self, weight: PackedWeight, bias: Tensor | None = None, activation: Activation | None = None
    ) -> PackedLinear:
        self._library = self._library or LinearLibrary()
        return PackedLinear(weight, bias, gate=activation, team=self._team, library=self._library)


def select_linears(config: ModelConfig, operators: Operators) -> Linears | None:
    """What multiplies with weights of whatever form `select_form` has chosen; None: torch."""
    return CpuLinears(operators) if config.device == "cpu" else None
