"""What a request changes about the logits of its next token, before anything is drawn."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine_service.barred_tokens import barred_tokens, left_of_allowed
from engine_service.sequence import Sequence
from engine_service.structured_output.logit_mask import keep_only
from engine_service.structured_output.token_mask import token_mask
from kernels.sampling_metadata import LogitAdjustment


def may_adjust(sequence: Sequence) -> bool:
    """Whether `adjustment_of` might be something."""
    params = sequence.sampling
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.min_tokens
        or params.bad_words
        or params.allowed_token_ids
        or sequence.grammar is not None
    )


def adjustment_of(sequence: Sequence, eos_token_ids: Iterable[int]) -> LogitAdjustment | None:
    """Of the sequence as it is now; None: nothing changes."""
    if not may_adjust(sequence):
        return None
    params = sequence.sampling
    barred = barred_tokens(sequence, eos_token_ids)
    left = left_of_allowed(sequence, barred)
    return LogitAdjustment(
        logit_bias=params.logit_bias,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        allowed=left,
        barred=() if left is not None else tuple(barred),
        mask=token_mask(sequence, eos_token_ids),
    )


def adjust(row: Tensor, adjustment: LogitAdjustment) -> None:
    """Changes the logits `[vocab]` in place."""
    if adjustment.logit_bias:
        row[list(adjustment.logit_bias)] += torch.tensor(
            list(adjustment.logit_bias.values()), dtype=row.dtype, device=row.device
        )
    if adjustment.repetition_penalty != 1.0:
        seen = torch.unique(_token_tensor(adjustment.token_ids, row))
        scores = row[seen]
        penalty = adjustment.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if adjustment.presence_penalty != 0.0 or adjustment.frequency_penalty != 0.0:
        output = _token_tensor(adjustment.token_ids[adjustment.num_prompt_tokens :], row)
        seen, counts = torch.unique(output, return_counts=True)
        penalties = adjustment.frequency_penalty * counts.double() + adjustment.presence_penalty
        row[seen] -= penalties.to(row.dtype)
    if adjustment.allowed is not None:
        # One of these has to be drawn also where the model has overflowed, so none of them stays -inf.
        lowest = torch.finfo(row.dtype).min / 2
        ids = _token_tensor(adjustment.allowed, row)
        kept = row[ids].nan_to_num_(nan=lowest, posinf=torch.inf, neginf=lowest)
        row.fill_(-torch.inf)
        row[ids] = kept
    if adjustment.barred:
        row[list(adjustment.barred)] = -torch.inf
    if adjustment.mask is not None:
        keep_only(row, adjustment.mask)


def _token_tensor(token_ids: Iterable[int], row: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=row.device)
