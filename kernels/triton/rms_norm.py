"""RMSNorm in Triton, with the residual addition that precedes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    output,  # [num_tokens, width], contiguous
    x,
    residual,  # read and written when adds_residual
    weight,  # [width]
    x_stride,
    residual_stride,
    eps,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    adds_residual: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_width)
    mask = columns < width
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    if adds_residual:
        # The sum is rounded to the stored type before it is normalised, as the reference does.
        value += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        tl.store(residual + row * residual_stride + columns, value, mask=mask)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + columns, mask=mask, other=0.0)
    scaled = normed.to(factor.dtype) * factor
    tl.store(output + row * width + columns, scaled.to(output.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Contracts: `rms_norm` and, with a residual, `add_rms_norm` of `kernels.operators.Operators`."""
    num_rows, width = x.shape
    output = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            output,
            x,
            residual if residual is not None else x,
            weight,
            x.stride(0),
            residual.stride(0) if residual is not None else 0,
            eps,
            width=width,
            padded_width=triton.next_power_of_2(width),
            adds_residual=residual is not None,
        )
    return output
