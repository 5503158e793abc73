"""A model without weights: the next token is a hash of the history.

It is also the oracle of the scheduler. Where a real runner writes keys and values, this one writes,
into a shadow of the KV cache, a digest of the history up to that token, and it reads the history back
through the block table. A wrong table, position or cache hit is an error at once instead of odd text.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine_service.barred_tokens import barred_tokens, left_of_allowed
from engine_service.runner import RowResults, Sampled
from engine_service.sequence import BlockCopy, BlockId, ScheduledRow, Sequence, StepPlan
from engine_service.structured_output.token_mask import allowed_token_ids, token_mask
from shared.identifiers import RequestId
from shared.messages import TokenLogprobs
from shared.sampling import SamplingParams

_MASK = 2**64 - 1


class KvMismatch(AssertionError):  # noqa: N818 - says what is wrong, like the assertions beside it
    """A row would have read keys and values of another history, or of none."""


class FakeModelFailure(Exception):  # noqa: N818 - the failure that a test asked for
    """Raised by a step that was told to fail."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """How the tokens follow from the history."""

    token_ids: range = field(default_factory=lambda: range(32, 127))  # what it can say
    eos_token_id: int = 256
    eos_every: int = 0  # about every so many tokens is an end of sequence; 0: never
    closers: frozenset[int] = frozenset(b'"}],')  # preferred where a form has to be kept: else it rambles

    def next_token(
        self,
        history_digest: int,
        position: int,
        sampling: SamplingParams,
        allowed: SequenceOf[int] | None = None,
    ) -> int:
        """The token after `position`. Depends on nothing but the arguments, as DESIGN rule 5 wants it.

        `allowed` are the tokens that structured output and other bans leave, not empty; None: there are none.
        """
        if not sampling.is_greedy:
            history_digest = mix(mix(history_digest, sampling.seed), position)
        spread = (history_digest * 0x9E3779B97F4A7C15 & _MASK) >> 20  # the low bits of a digest are poor
        if allowed is not None:
            closing = [token for token in allowed if token in self.closers or token == self.eos_token_id]
            choice = closing if closing and spread % 2 else allowed
            return choice[(spread >> 1) % len(choice)]
        if self.eos_every and spread % self.eos_every == 0:
            return self.eos_token_id
        return self.token_ids[spread % len(self.token_ids)]

    def logprobs(self, history_digest: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Made up, of the history and the chosen token: that one is the likeliest, its neighbours follow."""
        chance = history_digest % 1000 / 1000
        first = self.token_ids.start
        steps = range(1, min(num_top, len(self.token_ids)))
        neighbours = [first + (token_id - first + step) % len(self.token_ids) for step in steps]
        top = [(token, -0.7 * (rank + 1) - chance) for rank, token in enumerate([token_id, *neighbours])]
        return TokenLogprobs(token_id, top[0][1], 1, top[:num_top])

    def score(self, history_digest: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Of a token that the model did not choose, made up of it and the history: some rank from 1 to 5."""
        chance = history_digest % 1000 / 1000
        place = (history_digest >> 20) % 5  # from 0
        first = self.token_ids.start
        ranked = [first + (token_id - first + step) % len(self.token_ids) for step in range(1, num_top + 1)]
        ranked.insert(place, token_id)
        top = [(each, -0.7 * (rank + 1) - chance) for rank, each in enumerate(ranked[:num_top])]
        return TokenLogprobs(token_id, -0.7 * (place + 1) - chance, place + 1, top)

    def score_prompt(self, prompt: list[int], num_top: int) -> list[TokenLogprobs]:
        """What an engine must tell of a prompt: the same function without blocks, chunks or cache."""
        digest, scores = 0, []
        for token_id, next_token_id in itertools.pairwise(prompt):
            digest = mix(digest, token_id)
            scores.append(self.score(digest, next_token_id, num_top))
        return scores

    def generate(self, prompt: list[int], num_tokens: int, sampling: SamplingParams) -> list[int]:
        """What an engine must answer: the same function without blocks, batches or cache."""
        digest = digest_of(prompt)
        output: list[int] = []
        for position in range(len(prompt), len(prompt) + num_tokens):
            output.append(self.next_token(digest, position - 1, sampling))
            digest = mix(digest, output[-1])
        return output


def mix(digest: int, value: int) -> int:
    """One step of a 64-bit multiplicative hash."""
    return ((digest ^ value) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & _MASK


def digest_of(token_ids: Iterable[int]) -> int:
    digest = 0
    for token_id in token_ids:
        digest = mix(digest, token_id)
    return digest


@dataclass(frozen=True, slots=True)
class _PreparedRow:
    """What a row may know when it is planned: later its sequence may have been preempted."""

    row: ScheduledRow
    token_ids: list[int]  # of the row, as far as they are known
    block_ids: list[BlockId]
    scored_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class FakeStep:
    rows: list[_PreparedRow]
    copies: list[BlockCopy]


class FakeRunner:
    """A `Runner[FakeStep]` over the shadow cache. With `verify` each step reads every row's whole history.

    `sleep` gets `step_delay_s` once per step. Step number `die_at_step`, counted from 1, raises.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model: FakeModel | None = None,
        verify: bool = True,
        step_delay_s: float = 0.0,
        die_at_step: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._block_size = block_size
        self._slots: list[int | None] = [None] * (num_blocks * block_size)  # digest written there
        self._num_blocks = num_blocks
        self._model = model or FakeModel()
        self._verify = verify
        self._step_delay_s = step_delay_s
        self._die_at_step = die_at_step
        self._sleep = sleep
        self._num_steps = 0
        self._last_sampled: dict[RequestId, int] = {}  # by the step before

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def prepare(self, plan: StepPlan) -> FakeStep:
        rows = []
        for row in plan.rows:
            sequence = row.sequence
            token_ids = sequence.token_ids[row.start : row.start + row.num_tokens]
            rows.append(_PreparedRow(row, token_ids, list(sequence.block_ids), row.scored_token_ids))
        return FakeStep(rows, plan.copies)

    def execute(self, step: FakeStep, await_history: Callable[[], None] = lambda: None) -> RowResults:
        self._num_steps += 1
        if self._num_steps == self._die_at_step:
            raise FakeModelFailure(f"step {self._num_steps} was told to fail")
        if self._step_delay_s:
            self._sleep(self._step_delay_s)
        for copy in step.copies:
            self._copy(copy)
        for row in step.rows:  # all writes before the first read, as in each layer of a real model
            self._write(row)
        await_history()
        sampled = [self._read(row) for row in step.rows]
        self._last_sampled = {
            row.row.sequence.request_id: result.token_id
            for row, result in zip(step.rows, sampled, strict=True)
            if result is not None
        }
        return RowResults(
            sampled,
            {index: self._score(row) for index, row in enumerate(step.rows) if row.scored_token_ids},
        )

    def _copy(self, copy: BlockCopy) -> None:
        size = self._block_size
        source, target = copy.source * size, copy.target * size
        self._slots[target : target + size] = self._slots[source : source + size]

    def _write(self, prepared: _PreparedRow) -> None:
        row = prepared.row
        token_ids = prepared.token_ids
        if len(token_ids) < row.num_tokens:
            # None was sampled if the row was stale by then, as this one is now.
            token_ids = [*token_ids, self._last_sampled.get(row.sequence.request_id, 0)]
        digest = self._digest_at(prepared, row.start - 1)
        for position, token_id in enumerate(token_ids, start=row.start):
            digest = mix(digest, token_id)
            self._slots[self._slot(prepared, position)] = digest

    def _read(self, prepared: _PreparedRow) -> Sampled | None:
        row = prepared.row
        if row.is_stale:
            return None
        sequence = row.sequence
        last = row.start + row.num_tokens - 1
        if self._verify:
            digest = 0
            for position in range(last + 1):
                digest = mix(digest, sequence.token_ids[position])
                if self._digest_at(prepared, position) != digest:
                    raise KvMismatch(f"{sequence.request_id} reads another history at position {position}")
        if not row.samples:
            return None
        digest = self._digest_at(prepared, last)
        token_id = self._model.next_token(digest, last, sequence.sampling, self._allowed(sequence))
        num_top = sequence.sampling.logprobs
        return Sampled(token_id, None if num_top is None else self._model.logprobs(digest, token_id, num_top))

    def _score(self, prepared: _PreparedRow) -> list[TokenLogprobs]:
        """Of a stale row nothing: its blocks may hold another sequence's tokens by now."""
        row = prepared.row
        num_top = row.sequence.sampling.prompt_logprobs
        if row.is_stale or num_top is None:
            return []
        return [
            self._model.score(self._digest_at(prepared, position), token_id, num_top)
            for position, token_id in enumerate(prepared.scored_token_ids, start=row.start)
        ]

    def _allowed(self, sequence: Sequence) -> list[int] | None:
        """What bans and the form leave, as the sampler of a real model has it; None: anything."""
        eos_token_ids = (self._model.eos_token_id,)
        mask = token_mask(sequence, eos_token_ids)
        allowed = allowed_token_ids(mask) if mask is not None else None
        if not (sequence.sampling.bad_words or sequence.sampling.allowed_token_ids):
            return allowed
        barred = barred_tokens(sequence, eos_token_ids)
        left = left_of_allowed(sequence, barred)
        if left is None:
            left = [token_id for token_id in self._model.token_ids if token_id not in barred]
        if allowed is None:
            return left or list(self._model.token_ids)
        return sorted(set(left) & set(allowed)) or allowed

    def _digest_at(self, prepared: _PreparedRow, position: int) -> int:
        if position < 0:
            return 0
        digest = self._slots[self._slot(prepared, position)]
        if digest is None:
            name = prepared.row.sequence.request_id
            raise KvMismatch(f"{name} reads position {position}, which nobody wrote")
        return digest

    def _slot(self, prepared: _PreparedRow, position: int) -> int:
        index, offset = divmod(position, self._block_size)
        if index >= len(prepared.block_ids):
            raise KvMismatch(f"{prepared.row.sequence.request_id} has no block for position {position}")
        return prepared.block_ids[index] * self._block_size + offset
