"""One generated continuation and how far its computation has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

from engine_service.refusal import Refusal
from engine_service.structured_output.grammar import GrammarState
from shared.identifiers import RequestId, TenantId
from shared.messages import FinishReason
from shared.sampling import SamplingParams

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)


class SequenceState(enum.Enum):
    WAITING = enum.auto()  # holds no blocks
    RUNNING = enum.auto()
    FINISHED = enum.auto()  # holds no blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of a prompt and its output, and the blocks that hold their keys and values.

    `num_computed_tokens` chases `num_tokens`: there is no prefill or decode phase, only a distance.
    Keys and values exist for `token_ids[:num_computed_tokens]`; they lie in `block_ids[i]` for
    tokens `[i * block_size, (i + 1) * block_size)`. The block pool owns the blocks, the scheduler
    is the only one that changes the fields below the line.
    """

    request_id: RequestId
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant: TenantId
    priority: int = 1
    cache_salt: str = ""
    adapter: str = ""  # name of what is added to the weights; no adapter has a name of no characters
    arrival_s: float = 0.0  # monotonic
    deadline_s: float | None = None  # monotonic
    # ------------------------------------------------------------------ changed by the scheduler
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of full blocks of token_ids, in order
    may_publish: bool = True  # False from a reset of the prefix cache until the sequence starts over
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    grammar: GrammarState | None = None  # after the tokens so far; None also while it is being compiled
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    refusal: Refusal | None = None  # why it could not go on; the finish_reason is "abort" then

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One sequence's share of a step: compute tokens `[start, start + num_tokens)`."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the row reaches the last known token, whose logits give the next one."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes. Rows are in the scheduler's order; never empty."""

    rows: list[ScheduledRow]
    num_tokens: int
