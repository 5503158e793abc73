"""A linear layer with quantised weights, packed once for the C++ in linear.cpp."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int32, c_int64, c_void_p
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu.build import built_library
from kernels.cpu.weight_memory import WeightMemory
from kernels.dispatch import BackEndUnavailable
from kernels.quantized_reference import QuantizedWeight, quantize_weight

Gate = Literal["silu", "gelu_tanh"]
_FORMAT_NUMBERS = {"int8_channel": 0, "int8_group32": 1, "int8_group64": 2, "int4_group32": 3}
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
        ("num_threads", c_int32),
    )


class LinearLibrary:
    """The compiled functions. `instruction_set`: one of `kernels.cpu.build.INSTRUCTION_SETS`.

    Raises BackEndUnavailable where there is no compiler or it fails.
    """

    def __init__(self, instruction_set: str = "native") -> None:
        try:
            library = ctypes.CDLL(str(built_library(instruction_set)))
        except OSError as error:
            raise BackEndUnavailable(f"the compiled CPU kernels do not load: {error}") from error
        self.packed_bytes = library.headrace_linear_packed_bytes
        self.packed_bytes.argtypes = [c_void_p]
        self.packed_bytes.restype = c_int64
        self.pack = library.headrace_linear_pack
        self.pack.argtypes = [c_void_p] * 6
        self.pack.restype = None
        self.linear = library.headrace_linear
        self.linear.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int]
        self.linear.restype = None


class PackedLinear:
    """`x @ weight.T + bias`, or, with a gate, `gate(g) * u` of its halves g and u (gate first).

    Activations are rounded to 16 bits per row, relative to its largest magnitude; the arithmetic is that of
    `kernels.quantized_reference.reference_linear`. A row's result depends on nothing but the row: not on
    the batch, not on the threads. A row that holds infinity or NaN gives NaN.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        gate: Gate | None = None,
        num_threads: int = 1,
        memory: WeightMemory | None = None,
        library: LinearLibrary | None = None,
    ) -> None:
        """Copies the weight, keeps the bias (float32 `[num_outputs]`). Layers of a model share a `memory`.

        Raises ValueError for shapes that do not fit.
        """
        if gate not in _GATE_NUMBERS:
            raise ValueError(f"no gate is named {gate!r}; known: silu, gelu_tanh")
        if gate is not None and weight.num_outputs % 2:
            raise ValueError(f"a gate needs an even number of outputs, not {weight.num_outputs}")
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (weight.num_outputs,)):
            raise ValueError(
                f"the bias is {bias.dtype} {list(bias.shape)}; it must be float32 [{weight.num_outputs}]"
            )
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
        self.num_inputs = weight.num_inputs
        self.num_features = weight.num_outputs // (1 if gate is None else 2)
        """The width of the result."""
        self._bias = None if bias is None else bias.contiguous()
        library = library or LinearLibrary()
        self._linear = library.linear
        self._weights = _LinearWeights(
            packed=None,
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_inputs=weight.num_inputs,
            num_outputs=weight.num_outputs,
            format=_FORMAT_NUMBERS[weight.format.name],
            gate=_GATE_NUMBERS[gate],
            num_threads=num_threads,
        )
        self._address = ctypes.addressof(self._weights)
        num_bytes = library.packed_bytes(self._address)
        self.packed = memory.allocate(num_bytes) if memory else torch.empty(num_bytes, dtype=torch.uint8)
        """uint8; a call with one row reads it once."""
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        minimums = None if weight.minimums is None else weight.minimums.contiguous()
        has_groups = weight.format.group is not None
        library.pack(
            self._address,
            values.data_ptr(),
            scales.data_ptr() if has_groups else None,
            None if minimums is None else minimums.data_ptr(),
            None if has_groups else scales.data_ptr(),
            self.packed.data_ptr(),
        )
        self._weights.packed = self.packed.data_ptr()

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        format_name: str,
        bias: Tensor | None = None,
        *,
        gate: Gate | None = None,
        num_threads: int = 1,
        memory: WeightMemory | None = None,
        library: LinearLibrary | None = None,
    ) -> PackedLinear:
        """Rounds a float32 weight `[out, in]`. Raises ValueError as `quantize_weight` does."""
        quantized = quantize_weight(weight, format_name)
        return cls(quantized, bias, gate=gate, num_threads=num_threads, memory=memory, library=library)

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

    def _run(self, x: Tensor, output: Tensor, *, accumulates: bool) -> None:
        if x.ndim != 2 or x.shape[1] != self.num_inputs or x.dtype != torch.float32 or x.stride(1) != 1:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} with strides {x.stride()}; "
                f"it must be float32 [rows, {self.num_inputs}] with contiguous rows"
            )
        self._linear(
            self._address,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            output.data_ptr(),
            output.stride(0),
            accumulates,
        )
