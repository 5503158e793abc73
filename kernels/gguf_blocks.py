"""GGUF's quantised blocks of 32 values as they lie in a file, taken over without rounding.

Formats: `block_q4_0`, `block_q4_1`, `block_q8_0` in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.quantized_reference import FORMATS, QuantizedWeight

_GROUP = 32
BLOCK_BYTES: Mapping[str, int] = MappingProxyType({"Q4_0": 18, "Q4_1": 20, "Q8_0": 34})


def weight_from_blocks(rows: Tensor, kind: str) -> QuantizedWeight:
    """`rows` is uint8 `[num_outputs, bytes of a row]`. Raises ValueError for another kind or a cut-off row.

    A Q4_0 value `d * (q - 8)` is kept as `d * q + m` with m = -8 d: exact in float16 up to |d| = 8188.
    """
    if kind not in BLOCK_BYTES:
        raise ValueError(f"blocks of {kind} cannot be taken over; known: {', '.join(BLOCK_BYTES)}")
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] % BLOCK_BYTES[kind] or not rows.numel():
        raise ValueError(
            f"rows of {kind} are uint8 [out, multiple of {BLOCK_BYTES[kind]}], "
            f"not {rows.dtype} {list(rows.shape)}"
        )
    num_outputs = rows.shape[0]
    blocks = rows.reshape(num_outputs, -1, BLOCK_BYTES[kind])
    scales = _halves(blocks, 0)
    if kind == "Q8_0":
        values = blocks[..., 2:].contiguous().view(torch.int8).view(num_outputs, -1)
        return QuantizedWeight(FORMATS["int8_group32"], values, scales, None)
    minimums = _halves(blocks, 2) if kind == "Q4_1" else -8 * scales
    nibbles = blocks[..., -_GROUP // 2 :]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).view(num_outputs, -1)
    return QuantizedWeight(FORMATS["int4_group32"], values, scales, minimums)


def _halves(blocks: Tensor, offset: int) -> Tensor:
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)
