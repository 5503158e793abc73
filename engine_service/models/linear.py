"""The matrices that a decoder multiplies with: as they were loaded, or quantised for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torch.nn.functional import linear

from kernels.cpu.packed_linear import LinearLibrary, PackedLinear
from kernels.cpu.team import Team
from kernels.cpu.weight_memory import WeightMemory
from kernels.dispatch import BackEndUnavailable
from kernels.operators import Operators
from shared.config import ModelConfig
from shared.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
Linear = Callable[[Tensor], Tensor]
"""`[num_rows, in]` to `[num_rows, out]`, a new tensor."""


class Linears(Protocol):
    """Makes the layers of one model. What a layer is made of need not be kept by others for it."""

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """`x @ weight.T + bias`; weight `[out, in]`."""

    def gated(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> Linear:
        """`activation(g) * u` of the halves g and u of what `plain` gives, gate first."""


class DenseLinears:
    """By torch, in the type of the weights."""

    def __init__(self, operators: Operators) -> None:
        self._gates: dict[Activation, Linear] = {
            "silu": operators.silu_and_mul,
            "gelu_tanh": operators.gelu_tanh_and_mul,
        }

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return _Dense(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> Linear:
        gate = self._gates[activation]
        return lambda x: gate(linear(x, weight, bias))


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class QuantizedLinears:
    """With 8-bit weights and 16-bit activations, see kernels/quantized_reference.py. On a CPU, in float32."""

    def __init__(self, team: Team | None) -> None:
        """Raises ConfigError where the C++ that computes with them cannot be built."""
        try:
            self._library = LinearLibrary()
        except BackEndUnavailable as error:
            raise ConfigError(f"quantised weights need the CPU kernels: {error}", "quantization") from error
        self._team = team
        self._memory = WeightMemory()

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._packed(weight, bias, None)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> Linear:
        return self._packed(weight, bias, activation)

    def _packed(self, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Linear:
        return PackedLinear.from_float(
            weight,
            _format_of(weight.shape[1]),
            bias,
            gate=activation,
            team=self._team,
            memory=self._memory,
            library=self._library,
        )


def _format_of(num_inputs: int) -> str:
    """The most exact one for this width. Of groups of 64 and of 32 those of 64 were no worse, and faster."""
    for group in (64, 32):
        if num_inputs % group == 0:
            return f"int8_group{group}"
    return "int8_channel"


def select_linears(config: ModelConfig, operators: Operators) -> Linears | None:
    """As `config.quantization` says; None for weights as they are. Raises ConfigError."""
    return None if config.quantization is None else QuantizedLinears(getattr(operators, "team", None))
