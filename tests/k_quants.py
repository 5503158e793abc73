"""Blocks of Q4_K and Q6_K, which the gguf package reads but does not write, by plain rounding.

Formats: `block_q4_K` and `block_q6_K` in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

Array = np.ndarray[Any, Any]
BLOCK = 256


def quantize_any(values: Array, kind: GGMLQuantizationType) -> Array:
    """As `gguf.quants.quantize`, for these two as well. `values` is `[out, in]`."""
    blocks_of = {GGMLQuantizationType.Q4_K: _q4_k, GGMLQuantizationType.Q6_K: _q6_k}
    if kind not in blocks_of:
        quantized: Array = quantize(values, kind)
        return quantized
    blocks = blocks_of[kind](values.reshape(-1, BLOCK).astype(np.float32))
    return blocks.reshape(values.shape[0], -1)


def _q6_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 16, 16)
    scales, unit = _factors(np.abs(groups).max(-1) / 31, 127)
    values = _quotients(groups, scales * unit.astype(np.float32)[:, None]).clip(-32, 31).astype(np.int32) + 32
    quarters = values.reshape(-1, 2, 4, 32).astype(np.uint8)  # of each half
    low = quarters & 15
    low = np.concatenate((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), -1)
    high = np.bitwise_or.reduce(quarters >> 4 << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None], axis=2)
    return _joined(low, high, scales.astype(np.int8), unit)


def _q4_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(-1), 0)
    minimums, minimum_unit = _factors(-lowest, 63)
    scales, unit = _factors((groups.max(-1) - lowest) / 15, 63)
    offsets = minimums * minimum_unit.astype(np.float32)[:, None]
    shifted = groups + offsets[..., None]
    values = _quotients(shifted, scales * unit.astype(np.float32)[:, None]).clip(0, 15).astype(np.uint8)
    pairs = values.reshape(-1, 4, 2, 32)
    s, m = scales.astype(np.uint8), minimums.astype(np.uint8)
    factors = (
        s[:, :4] | s[:, 4:] >> 4 << 6,
        m[:, :4] | m[:, 4:] >> 4 << 6,
        s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    )
    return _joined(unit, minimum_unit, *factors, pairs[:, :, 0] | pairs[:, :, 1] << 4)


def _factors(wanted: Array, largest: int) -> tuple[Array, Array]:
    """Whole numbers up to `largest`, and the float16 `[num_blocks]` that they are multiplied with."""
    unit = (wanted.max(-1) / largest).astype(np.float16)
    return _quotients(wanted, unit.astype(np.float32)).clip(0, largest), unit


def _quotients(values: Array, units: Array) -> Array:
    """Rounded; 0 where a unit is."""
    units = units[..., None]
    quotients: Array = np.rint(np.divide(values, units, out=np.zeros_like(values), where=units != 0))
    return quotients


def _joined(*parts: Array) -> Array:
    as_bytes = [np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in parts]
    return np.concatenate(as_bytes, axis=1)
