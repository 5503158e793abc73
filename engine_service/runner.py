"""The seam between scheduling and computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine_service.sequence import StepPlan
from shared.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None  # set if the sequence asks for them


class Runner(Protocol):
    """Computes one step. Implemented by `ModelRunner` (weights) and `FakeRunner` (a hash of the history)."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that exist; fixed after construction."""

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """Writes keys and values of every row's tokens, and returns per row the next token.

        None for rows that do not sample (a chunk of a prompt that is not its last). Must not change
        any Sequence. The result of a row depends on its own sequence only, not on the other rows.
        """
