"""Computes steps with real weights: gathers a step's tokens, runs the model, samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine_service.kv_cache import allocate_kv_cache, copy_blocks
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.models.decoder import DecoderModel
from engine_service.models.linear import select_linears
from engine_service.models.registry import build_model
from engine_service.models.spec import ModelSpec
from engine_service.prompt_tokens import PromptTokens, gather_prompt_tokens
from engine_service.raw_logprobs import RawLogprobs
from engine_service.runner import RowResults, Sampled
from engine_service.sampler import Sampler
from engine_service.sequence import BlockCopy, BlockId, ScheduledRow, Sequence, StepPlan
from engine_service.thread_choice import fastest, thread_candidates
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.operators import CpuOperators
from kernels.cpu.sampling import NativeSampling
from kernels.dispatch import select_operators
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.identifiers import RequestId, TenantId
from shared.messages import ModelCard, TokenLogprobs
from shared.sampling import SamplingParams
from shared.text_bundle import TextBundle

_TRIAL_ROWS = 16  # of the step that is timed: few enough to start soon, enough that arithmetic counts


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


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The inputs of a step. Tokens and positions are flat, of all rows one after the other."""

    rows: list[ScheduledRow]
    token_ids: list[int]
    pending: dict[int, RequestId]  # by index into token_ids: those that the step before samples
    positions: torch.Tensor  # int64 `[num_tokens]`
    metadata: AttentionMetadata
    copies: list[BlockCopy]
    prompt_tokens: PromptTokens | None  # whose log-probabilities are asked for


class ModelRunner:
    """The `Runner[PreparedStep]` of a real model. Owns the KV cache; weights may be shared.

    Not thread-safe, but for what Runner says of `prepare`.
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
        self._operators = operators
        self.back_end = operators.name
        self._model = build_model(
            spec,
            loaded.weights.to(self._device),
            operators,
            num_positions=self.max_model_len,
            linears=select_linears(config, operators),
        )
        self._kv_cache = allocate_kv_cache(config, spec, self.max_model_len, self._device)
        self._native = NativeSampling(operators.team) if isinstance(operators, CpuOperators) else None
        self._sampler = Sampler(loaded.text_bundle.eos_token_ids, self._native)
        self._last_sampled: dict[RequestId, int] = {}  # by the step before

    @property
    def num_blocks(self) -> int:
        return self._kv_cache.num_blocks

    def choose_num_threads(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measures with how many of its threads a step is fastest. Before the first step of any sequence."""
        team = self._operators.team if isinstance(self._operators, CpuOperators) else None
        if team is None or len(candidates := thread_candidates(team.num_threads)) == 1:
            return
        step = self.prepare(_trial_plan(min(_TRIAL_ROWS, self.num_blocks)))

        def time_step(num_threads: int) -> float:
            team.resize(num_threads)
            self.execute(step)  # its threads have to start
            began = clock()
            self.execute(step)
            return clock() - began

        team.resize(fastest(candidates, time_step))
        self._last_sampled = {}

    @property
    def is_native(self) -> bool:
        """Whether the C++ kernels, with threads of their own, compute whole steps."""
        return isinstance(self._model, DecoderModel) and self._model.is_native

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

    def prepare(self, plan: StepPlan) -> PreparedStep:
        rows = plan.rows
        block_size = self._kv_cache.block_size
        context_lens = [row.start + row.num_tokens for row in rows]
        num_blocks = [-(-length // block_size) for length in context_lens]
        tables = np.zeros((len(rows), max(num_blocks)), dtype=np.int32)
        for index, row in enumerate(rows):
            tables[index, : num_blocks[index]] = row.sequence.block_ids[: num_blocks[index]]
        query_lens = np.array([row.num_tokens for row in rows])
        query_start = np.concatenate(([0], np.cumsum(query_lens)))
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)
        starts = np.array([row.start for row in rows])
        positions = np.arange(plan.num_tokens) - query_start[row_of_token] + starts[row_of_token]
        blocks = tables[row_of_token, positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size
        metadata = AttentionMetadata(
            query_start=self._to_device(query_start, torch.int32),
            context_lens=self._to_device(context_lens, torch.int32),
            block_tables=self._to_device(tables, torch.int32),
            slot_mapping=self._to_device(slots, torch.int64),
            max_query_len=int(query_lens.max()),
            max_context_len=max(context_lens),
        )
        token_ids, pending = _gather_tokens(rows)
        return PreparedStep(
            rows,
            token_ids,
            pending,
            self._to_device(positions, torch.int64),
            metadata,
            plan.copies,
            gather_prompt_tokens(rows, self._device),
        )

    @torch.inference_mode()
    def execute(self, step: PreparedStep, await_history: Callable[[], None] = lambda: None) -> RowResults:
        copy_blocks(self._kv_cache, step.copies)
        for index, request_id in step.pending.items():
            step.token_ids[index] = self._last_sampled.get(request_id, 0)  # none if that row was stale
        token_ids = self._to_device(step.token_ids, torch.int64)
        sampling = [index for index, row in enumerate(step.rows) if row.samples]
        last_tokens = step.metadata.query_start[1:].long() - 1
        logits, prompt_logprobs = self._forward(step, token_ids, last_tokens[sampling])
        await_history()
        results: list[Sampled | None] = [None] * len(step.rows)
        alive = [place for place, index in enumerate(sampling) if not step.rows[index].is_stale]
        if len(alive) < len(sampling):  # what ended with the token before
            logits = logits[alive]
        if alive:
            sampling = [sampling[place] for place in alive]
            sequences = [step.rows[index].sequence for index in sampling]
            raw = RawLogprobs(logits, sequences, self._native)  # first: the sampler changes the logits
            tokens = self._sampler.sample(logits, sequences)
            for index, token, logprobs in zip(sampling, tokens, raw.of(tokens), strict=True):
                results[index] = Sampled(token, logprobs)
        self._last_sampled = {
            row.sequence.request_id: result.token_id
            for row, result in zip(step.rows, results, strict=True)
            if result is not None
        }
        return RowResults(results, prompt_logprobs)

    def _forward(
        self, step: PreparedStep, token_ids: torch.Tensor, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, list[TokenLogprobs]]]:
        """The logits of some tokens, to sample from, and what is told of prompt tokens."""
        inputs = token_ids, step.positions, self._kv_cache, step.metadata
        prompt_tokens = step.prompt_tokens
        if prompt_tokens is None:
            return self._model.forward(*inputs, logit_rows), {}
        parts = self._model.forward_in_parts(*inputs, [logit_rows, *prompt_tokens.parts()])
        return next(parts), prompt_tokens.tell(parts, self._native)

    def _to_device(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self._device)


def _trial_plan(num_rows: int) -> StepPlan:
    """A step of single tokens, each a sequence of its own, which nobody has asked for."""
    greedy = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    rows = [
        ScheduledRow(
            Sequence(RequestId(f"trial-{i}"), [0], 1, greedy, TenantId("trial"), block_ids=[BlockId(i)]),
            start=0,
            num_tokens=1,
            samples=True,
        )
        for i in range(num_rows)
    ]
    return StepPlan(rows, num_rows)


def _gather_tokens(rows: list[ScheduledRow]) -> tuple[list[int], dict[int, RequestId]]:
    """The step's tokens, one row after the other, and which of them are still to be sampled, for whom."""
    token_ids: list[int] = []
    pending: dict[int, RequestId] = {}
    for row in rows:
        token_ids += row.sequence.token_ids[row.start : row.start + row.num_tokens]
        if row.start + row.num_tokens > row.sequence.num_tokens:
            pending[len(token_ids)] = row.sequence.request_id
            token_ids.append(0)
    return token_ids, pending
