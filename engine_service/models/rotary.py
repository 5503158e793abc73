"""Tables of the rotary position embedding, with every scaling of transformers' modeling_rope_utils.

Two scalings depend on the length of the text. transformers looks at the longest sequence of a batch; here
keys of one sequence are written in many steps, beside other sequences, and stay in the cache, so the angles
must not change. Both are therefore fixed by the configured max_model_len when the model is loaded:

- dynamic: up to the trained length nothing is scaled, as in transformers. A longer max_model_len uses, for
  all texts, the base that transformers uses at exactly that length.
- longrope: a max_model_len up to the original length uses the short factors, a longer one the long factors,
  for all texts. (vLLM decides in the same way.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine_service.models.spec import (
    DivisorScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)


def rotary_tables(rope: RopeSpec, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 `[num_positions, rotary_dim / 2]` each. num_positions is max_model_len."""
    frequencies = inverse_frequencies(rope, num_positions)
    # float32 throughout, as transformers computes them: the tables must agree to the last bits.
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    factor = attention_factor(rope)
    return angles.cos() * factor, angles.sin() * factor


def attention_factor(rope: RopeSpec) -> float:
    """Multiplies cosines and sines, and so queries and keys."""
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        return rope.scaling.attention_factor
    return 1.0


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 `[rotary_dim / 2]`."""
    dim, scaling = rope.rotary_dim, rope.scaling
    theta = rope.theta
    if isinstance(scaling, DynamicScaling):
        theta = _stretched_base(rope, scaling, num_positions)
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    match scaling:
        case LinearScaling():
            return 1.0 / periods / scaling.factor
        case Llama3Scaling():
            return _stretch_low(1.0 / periods, scaling)
        case YarnScaling():
            return _blend(periods, rope, scaling)
        case LongRopeScaling():
            is_long = num_positions > scaling.original_context_len
            divisors = scaling.long_divisors if is_long else scaling.short_divisors
            return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * periods)
        case DivisorScaling():
            return 1.0 / periods / torch.tensor(scaling.divisors, dtype=torch.float32)
        case DynamicScaling() | None:
            return 1.0 / periods


def _stretched_base(rope: RopeSpec, scaling: DynamicScaling, num_positions: int) -> float:
    growth = max(num_positions, scaling.original_context_len) / scaling.original_context_len
    exponent = rope.rotary_dim / (rope.rotary_dim - 2)
    return float(rope.theta * (scaling.factor * growth - (scaling.factor - 1)) ** exponent)


def _stretch_low(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths over the original context are divided by `factor`, short ones stay, between is a blend."""
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_context_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)  # 0: low frequency, fully stretched; 1: left alone
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _blend(periods: Tensor, rope: RopeSpec, scaling: YarnScaling) -> Tensor:
    """Pairs that turn more than beta_fast times over the original context stay, slow ones are stretched."""

    def pair_that_turns(num_turns: float) -> float:
        wavelength = scaling.original_context_len / (num_turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.rounds_borders:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers does, against a division by 0
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = ramp.clamp(0.0, 1.0)
    # 1 - (1 - x), not x: transformers' order of rounding
    kept = 1 - stretched
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
