"""The seam between scheduling and computing."""

from __future__ import annotations

from typing import Protocol

from engine_service.sequence import StepPlan


class Runner(Protocol):
    """Computes one step. Implemented by `ModelRunner` (weights) and `FakeRunner` (a hash of the history)."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that exist; fixed after construction."""

    def execute(self, plan: StepPlan) -> list[int | None]:
        """Writes keys and values of every row's tokens, and returns per row the next token id.

        None for rows that do not sample (a chunk of a prompt that is not its last). Must not change
        any Sequence. The result of a row depends on its own sequence only, not on the other rows.
        """
