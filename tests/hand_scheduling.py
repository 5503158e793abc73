"""The simplest way to drive a runner: every sequence owns a fixed range of blocks, nothing is shared."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from engine_service.runner import RowResults, Runner, Sampled
from engine_service.sequence import BlockId, ScheduledRow, Sequence, StepPlan
from shared.identifiers import RequestId, TenantId
from shared.sampling import SamplingParams


def make_sequence(index: int, prompt: list[int], sampling: SamplingParams, *, num_blocks: int) -> Sequence:
    """Sequence number `index`, with blocks `[index * num_blocks, (index + 1) * num_blocks)`."""
    return Sequence(
        request_id=RequestId(f"r{index}"),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        tenant=TenantId("test"),
        block_ids=[BlockId(index * num_blocks + block) for block in range(num_blocks)],
    )


def run_step(runner: Runner[Any], *rows: tuple[Sequence, int, int]) -> list[Sampled | None]:
    """Computes `num_tokens` tokens from `start` on of each sequence."""
    return compute(runner, *rows).sampled


def compute(runner: Runner[Any], *rows: tuple[Sequence, int, int]) -> RowResults:
    """The same, with all that the runner has to say of it."""
    planned = [
        ScheduledRow(sequence, start, num_tokens, samples=start + num_tokens == sequence.num_tokens)
        for sequence, start, num_tokens in rows
    ]
    return runner.execute(runner.prepare(StepPlan(planned, sum(row.num_tokens for row in planned))))


def run_to_end(runner: Runner[Any], sequences: SequenceOf[Sequence], *, num_tokens: int, chunk: int) -> None:
    """Computes all sequences together, at most `chunk` tokens of each per step, for `num_tokens` tokens."""
    while unfinished := [s for s in sequences if s.num_output_tokens < num_tokens]:
        rows = [
            (s, s.num_computed_tokens, min(chunk, s.num_tokens - s.num_computed_tokens)) for s in unfinished
        ]
        results = run_step(runner, *rows)
        for (sequence, _, num_computed), result in zip(rows, results, strict=True):
            sequence.num_computed_tokens += num_computed
            if result is not None:
                sequence.token_ids.append(result.token_id)
