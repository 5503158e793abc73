"""The seam between scheduling and computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from engine_service.sequence import StepPlan
from shared.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None  # set if the sequence asks for them


@dataclass(frozen=True, slots=True)
class RowResults:
    """What a step has computed. Rows are named by their index in the plan."""

    sampled: list[Sampled | None]  # for each row
    # of rows with `scored_token_ids`, one for each of these
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


PreparedT = TypeVar("PreparedT")


def _at_once() -> None:
    pass


class Runner(Protocol[PreparedT]):
    """Computes steps. Implemented by `ModelRunner` (weights) and `FakeRunner` (a hash of the history).

    `prepare` belongs to the thread that plans, `execute` to the one that computes. A step may be prepared
    while the one before it computes; steps are computed in the order in which they were prepared.
    """

    @property
    def num_blocks(self) -> int:
        """KV blocks that exist; fixed after construction."""

    def prepare(self, plan: StepPlan) -> PreparedT:
        """Copies out of the plan's sequences what the computation needs to know of them by then."""

    def execute(self, step: PreparedT, await_history: Callable[[], None] = _at_once) -> RowResults:
        """Writes keys and values of every row's tokens, and returns per row the next token.

        Calls `await_history` once, before it samples: from then on the sequences have the tokens of the step
        before, and do not change until the result is there. None for rows that do not sample (a
        chunk of a prompt that is not its last) or that are stale by then; a stale row's `prompt_logprobs`
        may be missing. Must not change any Sequence. The result of a row depends on its own sequence only,
        not on the other rows.
        """
