"""Computes embeddings: each text whole, in one forward pass, with nothing kept afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_service.kv_cache import KVCache
from engine_service.loaders.embedding import LoadedDecoder, LoadedEmbedder, LoadedEncoder
from engine_service.models.decoder import DecoderModel
from engine_service.models.encoder import TransformersEncoder
from engine_service.models.linear import select_linears
from engine_service.models.spec import DecoderSpec
from engine_service.pooling import pool, wanted_rows
from kernels.attention_metadata import AttentionMetadata
from kernels.dispatch import select_operators
from shared.config import ModelConfig, Pooling
from shared.errors import ConfigError, InvalidRequest


class TextModel(Protocol):
    def hidden_states(self, batch: list[list[int]], rows: Tensor) -> Tensor:
        """`[num_rows, dim]`: some tokens of the batch, counted through all its texts. No text is empty."""


class EmbeddingRunner:
    """Not thread-safe: one thread computes."""

    def __init__(self, config: ModelConfig, loaded: LoadedEmbedder, *, num_threads: int = 1) -> None:
        """Raises ConfigError if max_model_len is more than the model can."""
        model = loaded.model
        spec = model.spec if isinstance(model, LoadedDecoder) else model
        trained_len = min(spec.context_len, loaded.max_text_len or spec.context_len)
        self.max_model_len = config.max_model_len or trained_len
        if self.max_model_len > spec.context_len:
            raise ConfigError(
                f"max_model_len={self.max_model_len} of model {config.name!r} exceeds the "
                f"{spec.context_len} tokens that it was trained for",
                "max_model_len",
            )
        self.pooling: Pooling = config.pooling or loaded.pooling
        self.vocab_size = spec.vocab_size
        self._normalises = config.normalize
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._model = _text_model(config, model, self.max_model_len, num_threads)

    @property
    def is_native(self) -> bool:
        """Whether the C++ kernels, with threads of their own, compute the layers."""
        return isinstance(self._model, _WholeTexts) and self._model.is_native

    @torch.inference_mode()
    def embed(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """One vector per text, in order: float32 `[len(batch), dim]` on the CPU; `[0, 0]` for no texts.

        Texts go through the model together while they have at most max_num_batched_tokens tokens; a longer
        one goes alone. Raises InvalidRequest, naming `input[i]`, for a text that is empty, too long or has
        token ids outside of the vocabulary.
        """
        texts = [list(tokens) for tokens in batch]
        for index, tokens in enumerate(texts):
            self._check(index, tokens)
        vectors = [self._embed_together(group) for group in self._groups(texts)]
        return torch.cat(vectors).cpu() if vectors else torch.empty(0, 0)

    def vectors(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """As `embed`, for those who do not speak torch."""
        vectors: NDArray[np.float32] = self.embed(texts).numpy()
        return vectors

    def _check(self, index: int, tokens: list[int]) -> None:
        if not 0 < len(tokens) <= self.max_model_len:
            raise InvalidRequest(
                f"the text has {len(tokens)} tokens; the model takes 1 to {self.max_model_len}",
                f"input[{index}]",
            )
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise InvalidRequest(f"token ids must be from 0 to {self.vocab_size - 1}", f"input[{index}]")

    def _groups(self, texts: list[list[int]]) -> Iterator[list[list[int]]]:
        group: list[list[int]] = []
        num_tokens = 0
        for tokens in texts:
            if group and num_tokens + len(tokens) > self._max_num_batched_tokens:
                yield group
                group, num_tokens = [], 0
            group.append(tokens)
            num_tokens += len(tokens)
        if group:
            yield group

    def _embed_together(self, group: list[list[int]]) -> Tensor:
        lengths = [len(tokens) for tokens in group]
        rows = self._model.hidden_states(group, wanted_rows(self.pooling, lengths))
        return pool(self.pooling, rows, lengths, normalises=self._normalises)


def _text_model(
    config: ModelConfig, model: LoadedDecoder | LoadedEncoder, max_model_len: int, num_threads: int
) -> TextModel:
    device = torch.device(config.device)
    if isinstance(model, LoadedEncoder):
        return TransformersEncoder(model.module, device)
    operators = select_operators(None, device, num_threads=num_threads)
    decoder = DecoderModel(
        model.spec,
        model.weights.to(device),
        operators,
        num_positions=max_model_len,
        linears=select_linears(config, operators),
    )
    return _WholeTexts(decoder, model.spec, config.block_size, getattr(torch, config.dtype), device)


class _WholeTexts:
    """Runs a decoder over whole texts: the paged cache lives for one pass, and its layers share it."""

    def __init__(
        self,
        decoder: DecoderModel,
        spec: DecoderSpec,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._spec = spec
        self._block_size = block_size
        self._dtype = dtype
        self._device = device

    @property
    def is_native(self) -> bool:
        return self._decoder.is_native

    def hidden_states(self, batch: list[list[int]], rows: Tensor) -> Tensor:
        lengths = [len(tokens) for tokens in batch]
        positions = torch.cat([torch.arange(length) for length in lengths])
        metadata, num_blocks = self._metadata(lengths)
        shape = (num_blocks, self._spec.num_kv_heads, self._block_size, self._spec.head_dim)
        # A layer reads only what it has just written, so one layer's memory does for all of them.
        keys = torch.empty(shape, dtype=self._dtype, device=self._device)
        values = torch.empty_like(keys)
        cache = KVCache(
            keys=(keys,) * self._spec.num_layers,
            values=(values,) * self._spec.num_layers,
            num_blocks=num_blocks,
            block_size=self._block_size,
        )
        token_ids = torch.tensor(list(itertools.chain.from_iterable(batch))).to(self._device)
        return self._decoder.hidden_states(
            token_ids, positions.to(self._device), cache, metadata, rows.to(self._device)
        )

    def _metadata(self, lengths: list[int]) -> tuple[AttentionMetadata, int]:
        """Text i has the blocks after those of text i - 1."""
        size = self._block_size
        num_blocks = [-(-length // size) for length in lengths]
        first_blocks = [0, *itertools.accumulate(num_blocks)]
        tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
        for index, (first, count) in enumerate(zip(first_blocks, num_blocks, strict=False)):
            tables[index, :count] = torch.arange(first, first + count)
        slots = [
            first * size + torch.arange(length) for first, length in zip(first_blocks, lengths, strict=False)
        ]
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(self._device),
            context_lens=torch.tensor(lengths, dtype=torch.int32).to(self._device),
            block_tables=tables.to(self._device),
            slot_mapping=torch.cat(slots).to(self._device),
            max_query_len=max(lengths),
            max_context_len=max(lengths),
        )
        return metadata, first_blocks[-1]
