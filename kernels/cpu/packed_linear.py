"""A linear layer with quantised or float weights, packed once for the C++ in linear.cpp."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from ctypes import c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu.build import built_library
from kernels.cpu.team import Team, loaded_library
from kernels.cpu.weight_memory import WeightMemory
from kernels.quantized_reference import FORMATS, QuantizedWeight, WeightFormat, quantize_weight

Gate = Literal["silu", "gelu_tanh"]
ActivationBits = Literal[8, 16]
FLOAT_FORMATS: Mapping[torch.dtype, WeightFormat] = MappingProxyType(
    {
        dtype: WeightFormat(name, None, has_minimums=False)
        for name, dtype in (
            ("float32", torch.float32),
            ("bfloat16", torch.bfloat16),
            ("float16", torch.float16),
        )
    }
)
"""Of weights that are packed as they are, and multiplied with float32 activations."""

PACKED_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {**FORMATS, **{each.name: each for each in FLOAT_FORMATS.values()}}
)
"""Of all that can be packed, by name."""

_FORMAT_NUMBERS = {
    "int8_channel": 0,
    "int8_group32": 1,
    "int8_group64": 2,
    "int4_group32": 3,
    "float32": 4,
    "bfloat16": 5,
    "float16": 6,
    "int8_group16": 7,
}
_GATE_NUMBERS = {None: 0, "silu": 1, "gelu_tanh": 2}


class _LinearWeights(ctypes.Structure):
    """`LinearWeights` of linear.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("format", c_int32),
        ("gate", c_int32),
        ("activation_bits", c_int32),
    )


class LinearLibrary:
    """The compiled functions. `instruction_set`: as `kernels.cpu.build.built_library` takes it.

    Raises BackEndUnavailable where there is no compiler or it fails.
    """

    def __init__(self, instruction_set: str | None = None) -> None:
        library = loaded_library(built_library(instruction_set))
        self.serial_team = Team(1, library=library)
        """Runs on the calling thread alone."""
        self.library = library
        self.packed_bytes = library.headrace_linear_packed_bytes
        self.packed_bytes.argtypes = [c_void_p]
        self.packed_bytes.restype = c_int64
        self.pack = library.headrace_linear_pack
        self.pack.argtypes = [c_void_p] * 7
        self.pack.restype = None
        self.rows = library.headrace_linear_rows
        self.rows.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64]
        self.rows.restype = None
        self.linear = library.headrace_linear
        self.linear.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int]
        self.linear.restype = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in the order in which the C++ multiplies with it: for libraries of the same layout only."""

    format: WeightFormat
    num_outputs: int
    num_inputs: int
    is_gated: bool  # for a layer with a gate: the rows of gate and up lie side by side
    packed: Tensor  # uint8 `[num_bytes]`; a call with one row reads it once

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


def pack_weight(
    weight: QuantizedWeight | Tensor,
    *,
    is_gated: bool = False,
    team: Team | None = None,
    memory: WeightMemory | None = None,
    library: LinearLibrary | None = None,
) -> PackedWeight:
    """A copy, in `memory` if given. `team`: of the same library; None: the calling thread alone.

    A tensor is `[out, in]`, of a type in FLOAT_FORMATS. Raises ValueError for another one, and for a gated
    weight with an odd number of outputs.
    """
    weight_format, shape = _format_and_shape(weight)
    if is_gated and shape[0] % 2:
        raise ValueError(f"a gate needs an even number of outputs, not {shape[0]}")
    library = library or LinearLibrary()
    gate: Gate | None = "silu" if is_gated else None  # any: they are packed alike
    descriptor = _descriptor(weight_format, shape, gate)
    num_bytes = library.packed_bytes(ctypes.addressof(descriptor))
    packed = memory.allocate(num_bytes) if memory else torch.empty(num_bytes, dtype=torch.uint8)
    parts = (
        (weight, None, None)
        if isinstance(weight, Tensor)
        else (weight.values, weight.scales, weight.minimums)
    )
    values, scales, minimums = (None if part is None else part.contiguous() for part in parts)
    addresses = [None if part is None else part.data_ptr() for part in (values, scales, minimums)]
    has_groups = weight_format.group is not None
    library.pack(
        (team or library.serial_team).address,
        ctypes.addressof(descriptor),
        addresses[0],
        addresses[1] if has_groups else None,
        addresses[2],
        None if has_groups else addresses[1],
        packed.data_ptr(),
    )
    return PackedWeight(weight_format, *shape, is_gated, packed)


def _format_and_shape(weight: QuantizedWeight | Tensor) -> tuple[WeightFormat, tuple[int, int]]:
    if not isinstance(weight, Tensor):
        return weight.format, weight.shape
    if weight.ndim != 2 or weight.dtype not in FLOAT_FORMATS or 0 in weight.shape:
        known = ", ".join(each.name for each in FLOAT_FORMATS.values())
        raise ValueError(f"a weight of floats is {known} [out, in], not {weight.dtype} {list(weight.shape)}")
    return FLOAT_FORMATS[weight.dtype], (weight.shape[0], weight.shape[1])


def layout_signature(library: LinearLibrary) -> str:
    """Equal for two libraries that pack weights alike; found by letting them pack some."""
    digest = hashlib.sha256()
    for num_outputs, num_inputs in ((2, 64), (50, 576)):
        numbers = torch.arange(num_outputs * num_inputs).view(num_outputs, num_inputs) * 31 // 7
        weights: list[QuantizedWeight | Tensor] = [numbers.to(dtype) for dtype in FLOAT_FORMATS]
        weights += [_some_weight(each, numbers) for each in FORMATS.values()]
        for weight in weights:
            for is_gated in (False, True):
                packed = pack_weight(weight, is_gated=is_gated, library=library).packed
                digest.update(packed.numpy().tobytes())
    return digest.hexdigest()[:16]


def _some_weight(chosen: WeightFormat, numbers: Tensor) -> QuantizedWeight:
    values = (numbers % 16).to(torch.uint8) if chosen.has_minimums else numbers.to(torch.int8)
    num_groups = numbers.shape[1] // (chosen.group or numbers.shape[1])
    scales = numbers[:, :num_groups].to(torch.float32 if chosen.group is None else torch.float16)
    return QuantizedWeight(chosen, values, scales, -scales if chosen.has_minimums else None)


def _descriptor(
    weight_format: WeightFormat,
    shape: tuple[int, int],
    gate: Gate | None,
    activation_bits: ActivationBits = 16,
) -> _LinearWeights:
    return _LinearWeights(
        packed=None,
        bias=None,
        num_inputs=shape[1],
        num_outputs=shape[0],
        format=_FORMAT_NUMBERS[weight_format.name],
        gate=_GATE_NUMBERS[gate],
        activation_bits=activation_bits,
    )


class PackedLinear:
    """`x @ weight.T + bias`, or, with a gate, `gate(g) * u` of its halves g and u (gate first).

    With a quantised weight, activations are rounded to 16 bits per row, relative to its largest magnitude,
    or, where `activation_bits` is 8, to 8 bits relative to that of a group of 32 inputs; the arithmetic is
    that of `kernels.quantized_reference.reference_linear`, and a row that holds infinity or NaN gives NaN.
    With a weight of floats, all is float32. A row's result depends on nothing but the row: not on the batch,
    not on the threads.
    """

    def __init__(
        self,
        weight: QuantizedWeight | Tensor | PackedWeight,
        bias: Tensor | None = None,
        *,
        gate: Gate | None = None,
        activation_bits: ActivationBits = 16,
        team: Team | None = None,
        memory: WeightMemory | None = None,
        library: LinearLibrary | None = None,
    ) -> None:
        """Packs the weight unless it is, and keeps the bias (float32 `[num_outputs]`).

        `activation_bits` 8 is for 4-bit weights; others are multiplied as with 16.

        Layers of a model share a `memory`, and a `team` of the same library (None: the calling thread alone).
        Raises ValueError for shapes that do not fit.
        """
        if gate not in _GATE_NUMBERS:
            raise ValueError(f"no gate is named {gate!r}; known: silu, gelu_tanh")
        num_outputs = weight.shape[0]
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_outputs,)):
            raise ValueError(
                f"the bias is {bias.dtype} {list(bias.shape)}; it must be float32 [{num_outputs}]"
            )
        library = library or LinearLibrary()
        if not isinstance(weight, PackedWeight):
            is_gated = gate is not None
            weight = pack_weight(weight, is_gated=is_gated, team=team, memory=memory, library=library)
        if weight.is_gated != (gate is not None):
            raise ValueError("a weight is packed either for a gate or for none")
        self.num_inputs = weight.num_inputs
        self.num_features = weight.num_outputs // (1 if gate is None else 2)
        """The width of the result."""
        self.packed = weight.packed
        """uint8; a call with one row reads it once."""
        self._num_outputs = weight.num_outputs
        self._gate = gate
        self._bias = None if bias is None else bias.contiguous()
        self._linear, self._rows = library.linear, library.rows
        self._team = team or library.serial_team
        self._weights = _descriptor(weight.format, weight.shape, gate, activation_bits)
        self._weights.packed = weight.packed.data_ptr()
        self._weights.bias = None if self._bias is None else self._bias.data_ptr()
        self._address = ctypes.addressof(self._weights)

    @property
    def descriptor(self) -> int:
        """The address of the `LinearWeights` of linear.h, valid as long as this object lives."""
        return self._address

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        format_name: str,
        bias: Tensor | None = None,
        *,
        gate: Gate | None = None,
        activation_bits: ActivationBits = 16,
        team: Team | None = None,
        memory: WeightMemory | None = None,
        library: LinearLibrary | None = None,
    ) -> PackedLinear:
        """Rounds a float32 weight `[out, in]`, to a format of FLOAT_FORMATS or as `quantize_weight` does.

        Raises ValueError as that does.
        """
        rounded: QuantizedWeight | Tensor
        for dtype, each in FLOAT_FORMATS.items():
            if each.name == format_name:
                rounded = weight.to(dtype)
                break
        else:
            rounded = quantize_weight(weight, format_name)
        return cls(
            rounded,
            bias,
            gate=gate,
            activation_bits=activation_bits,
            team=team,
            memory=memory,
            library=library,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """A new `[num_rows, num_features]` of `x`, float32 `[num_rows, num_inputs]` with contiguous rows.

        Raises ValueError for another shape, type or layout.
        """
        output = torch.empty(x.shape[0], self.num_features)
        self._run(x, output, accumulates=False)
        return output

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)`, in place: float32 `[num_rows, num_features]` with contiguous rows.

        Raises ValueError for another shape, type or layout.
        """
        if (
            residual.shape != (x.shape[0], self.num_features)
            or residual.dtype != torch.float32
            or residual.stride(1) != 1
        ):
            raise ValueError(
                f"the residual is {residual.dtype} {list(residual.shape)} with strides {residual.stride()}; "
                f"it must be float32 [{x.shape[0]}, {self.num_features}] with contiguous rows"
            )
        self._run(x, residual, accumulates=True)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, dequantised: float32 `[len(indices), num_inputs]`, of int64 indices.

        Raises IndexError for a row that is not there, ValueError for a layer with a gate.
        """
        if self._gate is not None:
            raise ValueError("the rows of a gated weight are not told")
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self._num_outputs:
            raise IndexError(f"the weight has the rows 0 to {self._num_outputs - 1}")
        indices = indices.contiguous()
        output = torch.empty(len(indices), self.num_inputs)
        self._rows(self._address, indices.data_ptr(), len(indices), output.data_ptr(), self.num_inputs)
        return output

    def _run(self, x: Tensor, output: Tensor, *, accumulates: bool) -> None:
        if x.ndim != 2 or x.shape[1] != self.num_inputs or x.dtype != torch.float32 or x.stride(1) != 1:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} with strides {x.stride()}; "
                f"it must be float32 [rows, {self.num_inputs}] with contiguous rows"
            )
        self._linear(
            self._team.address,
            self._address,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            output.data_ptr(),
            output.stride(0),
            accumulates,
        )
