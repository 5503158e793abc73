"""Encoders (BERT and its like) and everything else without a cache: transformers' module, padded batches."""

from __future__ import annotations

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
        texts = [torch.tensor(tokens) for tokens in batch]
        pad_token_id = self._module.config.pad_token_id or 0
        padded = pad_sequence(texts, batch_first=True, padding_value=pad_token_id).to(self._device)
        masks = [torch.ones(len(tokens), dtype=torch.int64) for tokens in batch]
        mask = pad_sequence(masks, batch_first=True).to(self._device)
        hidden: Tensor = self._module(input_ids=padded, attention_mask=mask).last_hidden_state
        return hidden[mask.bool()][rows.to(self._device)]
