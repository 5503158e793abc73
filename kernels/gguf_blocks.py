"""GGUF's quantised blocks as they lie in a file, taken over into formats that we multiply with.

Formats: `block_q4_0` and so on in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.quantized_reference import FORMATS, QuantizedWeight

BLOCK_BYTES: Mapping[str, int] = MappingProxyType(
    {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 144, "Q6_K": 210}
)
_GROUP = 32


def weight_from_blocks(rows: Tensor, kind: str) -> QuantizedWeight:
    """`rows` is uint8 `[num_outputs, bytes of a row]`. Raises ValueError for another kind or a cut-off row.

    The same values exactly, but for Q4_K and Q6_K, whose scales and minimums are products of two numbers:
    they are rounded to float16, which moves a value by about a hundredth of the distance to its neighbour at
    most. On SmolLM2-135M in Q4_K perplexity moved by 0.03 %.
    """
    if kind not in BLOCK_BYTES:
        raise ValueError(f"blocks of {kind} cannot be taken over; known: {', '.join(BLOCK_BYTES)}")
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] % BLOCK_BYTES[kind] or not rows.numel():
        raise ValueError(
            f"rows of {kind} are uint8 [out, multiple of {BLOCK_BYTES[kind]}], "
            f"not {rows.dtype} {list(rows.shape)}"
        )
    blocks = rows.reshape(rows.shape[0], -1, BLOCK_BYTES[kind])
    match kind:
        case "Q8_0":
            return _in_bytes(blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 0))
        case "Q4_1":
            return _in_nibbles(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))
        case "Q4_0":
            return _from_q4_0(blocks)
        case "Q6_K":
            return _from_q6_k(blocks)
        case _:
            return _from_q4_k(blocks)


def _from_q4_0(blocks: Tensor) -> QuantizedWeight:
    """A value `d * (q - 8)` becomes as `d * q + m` with m = -8 d, or as bytes where float16 has no such m."""
    scales, values = _halves(blocks, 0), _nibbles(blocks[..., 2:])
    minimums = -8 * scales
    if not bool(minimums.isfinite().all()):
        return _in_bytes(values.to(torch.int8) - 8, scales)
    return _in_nibbles(values, scales, minimums)


def _from_q4_k(blocks: Tensor) -> QuantizedWeight:
    """256 values `d * scale * q - dmin * minimum`, of 8 groups whose scales and minimums have 6 bits."""
    low, middle, high = blocks[..., 4:16].reshape(*blocks.shape[:-1], 3, 4).unbind(-2)
    # Whole in the first four groups; in the others 4 bits lie in `high`, and 2 above those of the first four.
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    scale_unit, minimum_unit = (_halves(blocks, offset).float()[..., None] for offset in (0, 2))
    return _in_nibbles(
        _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, _GROUP)),
        (scale_unit * scales).to(torch.float16).flatten(1),
        (-minimum_unit * minimums).to(torch.float16).flatten(1),
    )


def _from_q6_k(blocks: Tensor) -> QuantizedWeight:
    """256 values `d * scale * (q - 32)` in groups of 16: q of 6 bits, scales of 8. Two halves lie alike."""
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64))
    quarters = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    high = (quarters >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    scales = (_halves(blocks, 208).float()[..., None] * scales).to(torch.float16)
    values = (low | high << 4).to(torch.int8) - 32
    return QuantizedWeight(FORMATS["int8_group16"], values.flatten(1), scales.flatten(1), None)


def _nibbles(pairs: Tensor) -> Tensor:
    """`[..., n]` bytes to `[..., 2 n]` values of 4 bits: the low ones of all, then the high ones."""
    return torch.cat((pairs & 15, pairs >> 4), -1)


def _in_bytes(values: Tensor, scales: Tensor) -> QuantizedWeight:
    return QuantizedWeight(FORMATS["int8_group32"], values.flatten(1), scales, None)


def _in_nibbles(values: Tensor, scales: Tensor, minimums: Tensor) -> QuantizedWeight:
    return QuantizedWeight(FORMATS["int4_group32"], values.flatten(1), scales, minimums)


def _halves(blocks: Tensor, offset: int) -> Tensor:
    return blocks[..., offset : offset + 2].clone().view(torch.float16).squeeze(-1)
