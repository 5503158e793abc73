"""Quantised weights, and the exact arithmetic of a linear layer with them, in plain torch: the C++'s oracle.

A weight is integers with scales, one per output or one per output and group of inputs, and in the 4-bit
format minimums: `w = scale * q + minimum`. Activations become integers at each call, with one scale per row:
of 16 bits, or, for 4-bit weights, of 8 bits times a factor that a group of inputs shares. Products are summed
exactly within a group; sums of groups and what follows are floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

LARGEST_ACTIVATION = 32767.0
LARGEST_BYTE = 127.0
LARGEST_FACTOR = 32767.0
ACTIVATION_GROUP = 32
SMALLEST_MAGNITUDE = 2.0**-100
"""A row of activations with nothing larger counts as zeros: its scale's inverse would not be finite."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    name: str
    group: int | None  # inputs that share a scale; None: all of an output
    has_minimums: bool  # then values are 0 .. 15, else -127 .. 127 (-128 where a file has it)


FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            WeightFormat("int8_channel", None, has_minimums=False),
            WeightFormat("int8_group16", 16, has_minimums=False),
            WeightFormat("int8_group32", 32, has_minimums=False),
            WeightFormat("int8_group64", 64, has_minimums=False),
            WeightFormat("int4_group32", 32, has_minimums=True),
        )
    }
)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    format: WeightFormat
    values: Tensor  # int8, or uint8 with minimums: [num_outputs, num_inputs]
    scales: Tensor  # float16 [num_outputs, num_groups], or float32 [num_outputs, 1] without groups
    minimums: Tensor | None  # float16 [num_outputs, num_groups]

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    def dequantized(self) -> Tensor:
        """float32 `[num_outputs, num_inputs]`."""
        groups = self.scales.shape[1]
        values = self.values.float().view(self.num_outputs, groups, -1) * self.scales.float()[..., None]
        if self.minimums is not None:
            values = values + self.minimums.float()[..., None]
        return values.view(self.num_outputs, self.num_inputs)

    def rows(self, indices: Tensor) -> QuantizedWeight:
        """These outputs only, in this order: rotary layouts permute them."""
        minimums = None if self.minimums is None else self.minimums[indices]
        return QuantizedWeight(self.format, self.values[indices], self.scales[indices], minimums)

    def split(self, num_outputs: Sequence[int]) -> list[QuantizedWeight]:
        """Views of so many outputs each; what `stacked` puts together."""
        ends = list(itertools.accumulate(num_outputs))
        parts = [slice(end - count, end) for end, count in zip(ends, num_outputs, strict=True)]
        minimums = self.minimums
        return [
            QuantizedWeight(
                self.format,
                self.values[part],
                self.scales[part],
                None if minimums is None else minimums[part],
            )
            for part in parts
        ]


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Of one format and width, along the outputs: q, k and v as one layer."""
    first = weights[0]
    assert all(weight.format == first.format for weight in weights), "one format"
    minimums = [weight.minimums for weight in weights if weight.minimums is not None]
    return QuantizedWeight(
        first.format,
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(minimums) if minimums else None,
    )


def in_one_format(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight] | None:
    """The same numbers in a format that all of them have, for `stacked`; None if there is none."""
    if all(weight.format == weights[0].format for weight in weights):
        return list(weights)
    as_bytes = [_in_bytes(weight) for weight in weights]
    present = [weight for weight in as_bytes if weight is not None]
    same = len(present) == len(weights) and all(weight.format == present[0].format for weight in present)
    return present if same else None


def _in_bytes(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Exactly the same without minimums, which is possible where they are a multiple of the scales (Q4_0)."""
    if weight.minimums is None:
        return weight
    if not torch.equal(weight.minimums, -8 * weight.scales):
        return None
    values = weight.values.to(torch.int8) - 8
    return QuantizedWeight(FORMATS["int8_group32"], values, weight.scales, None)


def weight_format(name: str) -> WeightFormat:
    """Raises ValueError for a name that is not in FORMATS."""
    if name not in FORMATS:
        raise ValueError(f"no weight format is named {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def quantize_weight(weight: Tensor, format_name: str) -> QuantizedWeight:
    """`weight` is float32 `[num_outputs, num_inputs]`.

    Raises ValueError for an unknown format, for a width that is no multiple of its group, and for
    numbers that are not finite or too large for the format's scales.
    """
    chosen = weight_format(format_name)
    _check_weight(weight, chosen)
    num_outputs, num_inputs = weight.shape
    grouped = weight.reshape(num_outputs, -1, chosen.group or num_inputs)
    scale_type = torch.float32 if chosen.group is None else torch.float16
    if chosen.has_minimums:
        minimums = grouped.amin(-1).to(torch.float16)
        scales = ((grouped.amax(-1) - minimums.float()) / 15).clamp_min(0).to(torch.float16)
        _check_range(scales, minimums)
        shifted = grouped - minimums.float()[..., None]
        values = _divided(shifted, scales).clamp_(0, 15).to(torch.uint8)
    else:
        minimums = None
        scales = (grouped.abs().amax(-1) / 127).to(scale_type)
        _check_range(scales)
        values = _divided(grouped, scales).clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(chosen, values.view(num_outputs, num_inputs), scales, minimums)


def _divided(values: Tensor, scales: Tensor) -> Tensor:
    wide = scales.float()
    inverse = torch.where(wide > 0, 1 / wide, 0).nan_to_num(posinf=0.0)
    return (values * inverse[..., None]).round_()


def _check_weight(weight: Tensor, chosen: WeightFormat) -> None:
    if weight.ndim != 2 or weight.dtype != torch.float32 or 0 in weight.shape:
        raise ValueError(f"a weight is float32 [out, in], not {weight.dtype} {list(weight.shape)}")
    if chosen.group is not None and weight.shape[1] % chosen.group:
        raise ValueError(
            f"the weight has {weight.shape[1]} inputs, "
            f"which {chosen.name} cannot cut into groups of {chosen.group}"
        )


def _check_range(*factors: Tensor) -> None:
    if not all(bool(factor.isfinite().all()) for factor in factors):
        raise ValueError("the weight holds a number that is not finite or too large for a 16-bit scale")


def quantize_activations(x: Tensor, bits: int = 16) -> tuple[Tensor, Tensor]:
    """int64 `[num_rows, num_inputs]`, and float32 scales `[num_rows]`: NaN for rows that are not finite.

    With 8 bits they are integers of 8 bits times factors of 15 bits, of which each group of 32 has one.
    """
    largest = x.abs().amax(-1, keepdim=True)
    is_finite = x.isfinite().all(-1, keepdim=True)
    is_usable = is_finite & (largest >= SMALLEST_MAGNITUDE)
    usable = x.where(is_usable, 0)
    if bits == 8:
        scales = torch.where(is_usable, largest / (LARGEST_BYTE * LARGEST_FACTOR), 0)
        groups = usable.view(len(x), -1, ACTIVATION_GROUP)
        shares = groups.abs().amax(-1, keepdim=True) / largest.where(is_usable, 1)[:, None]
        group_factors = (shares * LARGEST_FACTOR).ceil().clamp_min(1)
        # A number divided by a tensor is the inverse times the number in torch, which rounds twice.
        inverses = torch.tensor(1.0) / (group_factors * scales[:, None]).where(is_usable[:, None], 1)
        values = ((groups * inverses).round() * group_factors).view(x.shape)
    else:
        scales = torch.where(is_usable, largest / LARGEST_ACTIVATION, 0)
        factors = torch.where(is_usable, torch.tensor(LARGEST_ACTIVATION) / largest, 0)
        values = (usable * factors).round()
    return values.long(), scales.where(is_finite, torch.nan)[:, 0]


def reference_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, activation_bits: int = 16
) -> Tensor:
    """float32 `[num_rows, num_outputs]` of float32 `[num_rows, num_inputs]`; floats are summed in float64."""
    values, scales = quantize_activations(x, activation_bits)
    groups = weight.scales.shape[1]
    grouped = values.view(len(x), groups, -1).double()  # exact: sums stay far below 2^53
    integers = weight.values.view(weight.num_outputs, groups, -1).double()
    sums = torch.einsum("mgk,ngk->mng", grouped, integers)
    totals = (sums * weight.scales.double()).sum(-1)
    if weight.minimums is not None:
        totals = totals + grouped.sum(-1) @ weight.minimums.double().T
    result = totals * scales.double()[:, None]
    if bias is not None:
        result = result + bias.double()
    return result.float()
