"""One generated continuation and how far its computation has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from engine_service.refusal import Refusal
from engine_service.structured_output.grammar import GrammarState
from shared.identifiers import RequestId, TenantId
from shared.messages import FinishReason, TokenLogprobs
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

    `num_computed_tokens` chases `num_tokens`: there is no prefill or decode phase, only a distance. Keys
    and values of so many tokens exist, or will when the steps that are planned have been computed. They
    lie in `block_ids[i]` for tokens `[i * block_size, (i + 1) * block_size)`. A step that is planned before
    the one ahead of it is done counts on a token that is not known yet, see `num_pending_tokens`. The block
    pool owns the blocks, the scheduler is the only one that changes the fields below the line.
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
    search_id: RequestId | None = None  # the beam search that it is a step of: it ends after one token
    # ------------------------------------------------------------------ changed by the scheduler
    state: SequenceState = SequenceState.WAITING
    final_length: int = 0  # tokens when it runs to its limit, prompt included; set when it is accepted
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0  # that steps sample whose result was not taken in
    block_ids: list[BlockId] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of full blocks of token_ids, in order
    num_published_blocks: int = 0  # of block_ids, the first so many can be found, or were cached before
    may_publish: bool = True  # False from a reset of the prefix cache until the sequence starts over
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    num_scored_tokens: int = 0  # of the prompt without its first, whose log-probabilities are known, if asked
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # these, until they are told
    grammar: GrammarState | None = None  # after the tokens so far; None also while it is being compiled
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    refusal: Refusal | None = None  # why it could not go on; the finish_reason is "abort" then

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens, known or pending, that no step has computed or will; 1 while it decodes.

        The last token that a sequence can have is never computed.
        """
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        return min(num_tokens, self.final_length - 1) - self.num_computed_tokens

    @property
    def reads_cache(self) -> bool:
        """Whether it may stand on what others computed: not while something is to be told of each token."""
        return not self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked for and not all known."""
        return (
            self.sampling.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1
        )

    def take_prompt_logprobs(self) -> list[TokenLogprobs]:
        """All that are known, to be told: nothing of them is kept, since they may be large."""
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return taken

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def owner_id(self) -> RequestId:
        """The request that it is for."""
        return self.request_id if self.search_id is None else self.search_id

    @property
    def goes_on(self) -> bool:
        """Whether it begins where others of its beam search have ended: it is no new request."""
        return self.search_id is not None and self.search_id != self.request_id


class ScheduledRow(NamedTuple):
    """One sequence's share of a step: compute tokens `[start, start + num_tokens)`.

    A last token that is not known yet is the one that the step before samples for the sequence.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool  # whether the row reaches the last token, whose logits give the next one
    num_preemptions: int = 0  # of the sequence when the row was planned

    @property
    def scored_token_ids(self) -> list[int]:
        """Prompt tokens whose log-probabilities the row has to tell: those behind each of its own.

        Of the plan's time: some of them may be known by the time that the row is computed.
        """
        sequence = self.sequence
        if not sequence.scores_prompt:
            return []
        end = min(self.start + self.num_tokens + 1, sequence.num_prompt_tokens)
        return sequence.token_ids[self.start + 1 : end]

    @property
    def is_stale(self) -> bool:
        """Whether the sequence has ended or was preempted since: nothing comes of the row. Never reverts."""
        sequence = self.sequence
        return sequence.state is SequenceState.FINISHED or sequence.num_preemptions != self.num_preemptions


class BlockCopy(NamedTuple):
    """All of one block, to be written to another before a step computes anything."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes. Rows are in the scheduler's order; never empty."""

    rows: list[ScheduledRow]
    num_tokens: int
    copies: list[BlockCopy] = field(default_factory=list)  # to be made first, in this order
