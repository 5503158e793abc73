"""Tables of the rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine_service.models.spec import Llama3Scaling, RopeSpec


def rotary_tables(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 `[num_positions, head_dim / 2]` each."""
    frequencies = inverse_frequencies(rope, head_dim)
    # float32 throughout, as transformers computes them: the tables must agree to the last bits.
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    return frequencies / rope.linear_factor


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths over the original context are divided by `factor`, short ones stay, between is a blend."""
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_context_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)  # 0: low frequency, fully stretched; 1: left alone
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
