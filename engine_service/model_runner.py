"""Computes steps with real weights: gathers a step's tokens, runs the model, samples."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from engine_service.kv_cache import allocate_kv_cache
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.models.registry import build_model
from engine_service.models.spec import ModelSpec
from engine_service.raw_logprobs import RawLogprobs
from engine_service.runner import Sampled
from engine_service.sampler import Sampler
from engine_service.sequence import ScheduledRow, StepPlan
from kernels.attention_metadata import AttentionMetadata
from kernels.dispatch import select_operators
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.messages import ModelCard
from shared.text_bundle import TextBundle


def use_threads(num_threads: int) -> None:
    """Sets the number of threads of torch's operators, as far as the calling thread uses them."""
    torch.set_num_threads(num_threads)


def resolve_max_model_len(config: ModelConfig, spec: ModelSpec) -> int:
    """The configured length, or the trained one. Raises ConfigError if more is asked than the model can."""
    if config.max_model_len is None:
        return spec.context_len
    if config.max_model_len > spec.extended_context_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} of model {config.name!r} exceeds the "
            f"{spec.extended_context_len} tokens that it was trained for",
            "max_model_len",
        )
    return config.max_model_len


class ModelRunner:
    """The `engine_service.runner.Runner` of a real model. Owns the KV cache; weights may be shared.

    Not thread-safe: one step loop drives it.
    """

    def __init__(
        self, config: ModelConfig, loaded: LoadedModel, *, num_threads: int, back_end: str | None = None
    ) -> None:
        """back_end: a name of kernels.dispatch, None for the fastest. Raises ConfigError."""
        spec = loaded.spec
        self.max_model_len = resolve_max_model_len(config, spec)
        self._config = config
        self._spec = spec
        self._text_bundle = loaded.text_bundle
        self._device = torch.device(config.device)
        operators = select_operators(back_end, self._device, num_threads=num_threads)
        self.back_end = operators.name
        self._model = build_model(
            spec, loaded.weights.to(self._device), operators, num_positions=self.max_model_len
        )
        self._kv_cache = allocate_kv_cache(config, spec, self.max_model_len, self._device)
        self._sampler = Sampler(loaded.text_bundle.eos_token_ids)

    @property
    def num_blocks(self) -> int:
        return self._kv_cache.num_blocks

    @property
    def text_bundle(self) -> TextBundle:
        return self._text_bundle

    @property
    def model_card(self) -> ModelCard:
        return ModelCard(
            name=self._config.name,
            architecture=self._spec.architecture,
            vocab_size=self._spec.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            block_size=self._kv_cache.block_size,
            num_blocks=self.num_blocks,
            dtype=self._config.dtype,
            eos_token_ids=self._text_bundle.eos_token_ids,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        token_ids, positions, metadata = self._inputs(plan.rows)
        sampling = [index for index, row in enumerate(plan.rows) if row.samples]
        last_tokens = metadata.query_start[1:].long() - 1
        logits = self._model.forward(token_ids, positions, self._kv_cache, metadata, last_tokens[sampling])
        results: list[Sampled | None] = [None] * len(plan.rows)
        if sampling:
            sequences = [plan.rows[index].sequence for index in sampling]
            raw = RawLogprobs(logits, sequences)  # first: the sampler changes the logits
            tokens = self._sampler.sample(logits, sequences)
            for index, token, logprobs in zip(sampling, tokens, raw.of(tokens), strict=True):
                results[index] = Sampled(token, logprobs)
        return results

    def _inputs(self, rows: list[ScheduledRow]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Token ids and positions, int64 `[num_tokens]`, and where they and their context lie."""
        block_size = self._kv_cache.block_size
        context_lens = [row.start + row.num_tokens for row in rows]
        num_blocks = [-(-length // block_size) for length in context_lens]
        tables = np.zeros((len(rows), max(num_blocks)), dtype=np.int32)
        for index, row in enumerate(rows):
            tables[index, : num_blocks[index]] = row.sequence.block_ids[: num_blocks[index]]
        token_ids = list(
            itertools.chain.from_iterable(
                row.sequence.token_ids[row.start : row.start + row.num_tokens] for row in rows
            )
        )
        query_lens = np.array([row.num_tokens for row in rows])
        query_start = np.concatenate(([0], np.cumsum(query_lens)))
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)
        starts = np.array([row.start for row in rows])
        positions = np.arange(len(token_ids)) - query_start[row_of_token] + starts[row_of_token]
        blocks = tables[row_of_token, positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size

        def to_device(values: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(self._device)

        metadata = AttentionMetadata(
            query_start=to_device(query_start, torch.int32),
            context_lens=to_device(context_lens, torch.int32),
            block_tables=to_device(tables, torch.int32),
            slot_mapping=to_device(slots, torch.int64),
            max_query_len=int(query_lens.max()),
            max_context_len=max(context_lens),
        )
        return to_device(token_ids, torch.int64), to_device(positions, torch.int64), metadata
