"""How much one step may do: the seam between the scheduler and a target for the inter-token latency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine_service.sequence import StepPlan


@dataclass(frozen=True, slots=True)
class LimitsReport:
    """Where the limits stand, for those who watch the engine."""

    max_num_seqs: int
    max_num_tokens: int  # of the last step that was planned
    decode_step_p95_ms: float = 0.0  # of the last 100 steps in which somebody decoded; 0: not measured
    meets_target: bool | None = None  # whether that is within the target; None: there is no target


class StepLimits(Protocol):
    """Asked while a step is planned, told what it took. All calls come from the thread that plans."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that may run at once, at least 1. Fewer than before: nobody is thrown out, but
        nobody is admitted either until enough have ended."""

    def max_num_tokens(self, num_decoding: int) -> int:
        """Tokens that the next step may compute, at least 1, given that so many sequences decode in it."""

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        """A step of this plan took so long, from the end of the one before it or from its own start."""

    def report(self) -> LimitsReport:
        """After the last step."""


class FixedLimits:
    """As configured, whatever the steps take."""

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def max_num_tokens(self, num_decoding: int) -> int:
        return self._max_num_batched_tokens

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        pass

    def report(self) -> LimitsReport:
        return LimitsReport(self.max_num_seqs, self._max_num_batched_tokens)
