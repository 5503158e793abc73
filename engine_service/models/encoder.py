"""Encoders (BERT and its like) and everything else without a cache: transformers' module, padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class TransformersEncoder:
    """Hidden states of whole texts by a bare `PreTrainedModel`, one without a head."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module.to(device)
        self._device = device

    def hidden_states(self, batch: list[list[int]], rows: Tensor) -> Tensor:
        """`[num_rows, dim]`: some tokens of the batch, counted through all its texts."""
        states: dict[int, Tensor] = {}
        for group in of_like_length([len(tokens) for tokens in batch]):
            hidden = self._forward([torch.tensor(batch[index]) for index in group])
            for row, index in enumerate(group):
                states[index] = hidden[row, : len(batch[index])]
        return torch.cat([states[index] for index in range(len(batch))])[rows.to(self._device)]

    def _forward(self, texts: list[Tensor]) -> Tensor:
        """`[num_texts, longest, dim]`; what lies behind the end of a text means nothing."""
        pad_token_id = self._module.config.pad_token_id or 0
        padded = pad_sequence(texts, batch_first=True, padding_value=pad_token_id).to(self._device)
        masks = [torch.ones(len(tokens), dtype=torch.int64) for tokens in texts]
        mask = pad_sequence(masks, batch_first=True).to(self._device)
        hidden: Tensor = self._module(input_ids=padded, attention_mask=mask).last_hidden_state
        return hidden


def of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Which texts share a padded batch: those of at least half the length of its longest.

    So no batch computes more than twice its tokens. One long text among many short ones would otherwise
    have each of them computed at its own length.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups and 2 * lengths[index] >= lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
