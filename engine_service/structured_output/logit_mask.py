"""Keeps the logits of the allowed tokens only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine_service.structured_output.grammar import PackedMask


def keep_only(row: Tensor, mask: PackedMask) -> None:
    """Sets the logits of all other tokens to -inf. row: float32 `[vocab]`, changed in place.

    An allowed token can always be drawn, also where the model has overflowed: what is not a number, or
    -inf, becomes the lowest number.
    """
    if row.device.type == "cpu":
        keep_only_on_cpu(row, mask)
    else:
        keep_only_on_device(row, mask)


def keep_only_on_cpu(row: Tensor, mask: PackedMask) -> None:
    # With numpy, since torch would share each of these small loops out among its threads: on cores that
    # others use as well, waiting for the last thread took a hundred times as long as the loop.
    logits = row.numpy()
    is_allowed = np.unpackbits(mask, count=len(logits), bitorder="little").view(np.bool_)
    lowest = _lowest(row)
    np.copyto(logits, lowest, where=~(logits >= lowest))
    np.copyto(logits, -np.inf, where=~is_allowed)


def keep_only_on_device(row: Tensor, mask: PackedMask) -> None:
    # Sent in packed form, an eighth of a byte per token, and unpacked there.
    packed = torch.from_numpy(mask).to(row.device)
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=row.device)) & 1
    is_barred = bits.flatten()[: row.shape[0]] == 0
    lowest = _lowest(row)
    row.nan_to_num_(nan=lowest, posinf=torch.inf, neginf=lowest).masked_fill_(is_barred, -torch.inf)


def _lowest(row: Tensor) -> float:
    return torch.finfo(row.dtype).min / 2  # half, so that the sampler can subtract the largest
