"""The prompt tokens of a step whose log-probabilities are asked for, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from engine_service.raw_logprobs import logprobs_of
from engine_service.sequence import ScheduledRow
from kernels.cpu.sampling import NativeSampling
from shared.messages import TokenLogprobs

_ROWS_AT_ONCE = 128  # of logits: 25 MB with 49k tokens, where a chunk of 512 rows would take four times that


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Of all rows of the plan that ask, one after the other; at least one token."""

    token_ids: list[int]
    logit_rows: Tensor  # int64, of the step's tokens: those before each of token_ids
    nums_top: list[int]  # alternatives that are wanted beside each
    counts: dict[int, int]  # by row of the plan

    def parts(self) -> tuple[Tensor, ...]:
        """`logit_rows`, as many at once as there is memory for."""
        return torch.split(self.logit_rows, _ROWS_AT_ONCE)

    def tell(
        self, logits_of_parts: Iterable[Tensor], native: NativeSampling | None = None
    ) -> dict[int, list[TokenLogprobs]]:
        """By row of the plan. The logits are float32 `[len(part), vocab]`, taken one part after the other."""
        told = self._tell(logits_of_parts, native)
        return {row: list(islice(told, count)) for row, count in self.counts.items()}

    def _tell(
        self, logits_of_parts: Iterable[Tensor], native: NativeSampling | None
    ) -> Iterator[TokenLogprobs]:
        start = 0
        for logits in logits_of_parts:
            end = start + logits.shape[0]
            yield from logprobs_of(list(logits), self.token_ids[start:end], self.nums_top[start:end], native)
            start = end


def gather_prompt_tokens(rows: list[ScheduledRow], device: torch.device) -> PromptTokens | None:
    """None if no row asks."""
    if all(row.sequence.sampling.prompt_logprobs is None for row in rows):
        return None
    token_ids: list[int] = []
    logit_rows: list[int] = []
    nums_top: list[int] = []
    counts: dict[int, int] = {}
    start = 0
    for index, row in enumerate(rows):
        scored, num_top = row.scored_token_ids, row.sequence.sampling.prompt_logprobs
        if scored and num_top is not None:
            token_ids += scored
            logit_rows += range(start, start + len(scored))
            nums_top += [num_top] * len(scored)
            counts[index] = len(scored)
        start += row.num_tokens
    if not counts:
        return None
    return PromptTokens(token_ids, torch.tensor(logit_rows, device=device), nums_top, counts)
