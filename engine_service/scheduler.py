"""Which tokens of which sequences the next step computes.

There is no prefill or decode phase. Each sequence has `num_computed_tokens` chasing `num_tokens`;
a step hands out a budget of tokens, to the running sequences first, then to waiting ones.

When a hash is published: after the step that computed the block, in `update`. Publishing while the
step is planned would also let two sequences of one step share, but a step that fails would then
leave hashes of blocks that hold nothing.

Who frees blocks: `_release`, and nobody else. It empties the table, so a second call is harmless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine_service.block_pool import BlockPool, extend_block_hashes
from engine_service.refusal import Refusal
from engine_service.runner import Sampled
from engine_service.scheduling_policy import FirstComeFirstServed, SchedulingPolicy
from engine_service.sequence import BlockId, ScheduledRow, Sequence, SequenceState, StepPlan
from engine_service.structured_output.grammar import GrammarState
from shared.identifiers import RequestId
from shared.messages import FinishReason


def _num_missing(sequence: Sequence) -> int:
    """Tokens that are known and not computed; one while a sequence decodes."""
    return sequence.num_tokens - sequence.num_computed_tokens


class Scheduler:
    """Queues, admits, preempts and ends sequences; owns their block tables.

    One caller: `schedule` and `update` alternate. `add` and `abort` may come at any moment between
    calls, also between a plan and its update, but not while the runner computes.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queued_requests: int,
        max_queued_tokens: int | None = None,
        long_prefill_token_threshold: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        enable_prefix_caching: bool = True,
        policy: SchedulingPolicy | None = None,
        force_preemption_every: int = 0,
    ) -> None:
        """None bounds nothing, of `max_queued_tokens` (prompt tokens that wait) and of
        `long_prefill_token_threshold` (tokens of one prompt in one step, while there are other sequences).
        `force_preemption_every` k > 0 preempts one sequence every k steps: for tests of that path.
        """
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens or math.inf
        self._num_queued_tokens = 0  # of the sequences that wait or are deferred
        self._max_row_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._enable_prefix_caching = enable_prefix_caching
        self._waiting: SchedulingPolicy = policy if policy is not None else FirstComeFirstServed()
        self._running: list[Sequence] = []  # in order of admission
        # Accepted, but they lack something that is being made. They are outside of the policy's queue,
        # so that those behind them pass; they take their place in it when they lack nothing any more.
        self._deferred: dict[RequestId, Sequence] = {}
        self._sequences: dict[RequestId, Sequence] = {}  # deferred, waiting and running
        self._planned: StepPlan | None = None
        self._force_preemption_every = force_preemption_every
        self._forced_at: dict[RequestId, int] = {}
        self._num_plans = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # tokens looked up; a sequence counts at its first admission only,
        self.prefix_cache_hits = 0  # lest preemption flatters the hit rate

    # ------------------------------------------------------------------ state

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Those that are deferred among them."""
        return len(self._waiting) + len(self._deferred)

    @property
    def has_only_deferred(self) -> bool:
        """Whether there is something to do, but nothing that could be done now."""
        return 0 < len(self._deferred) == len(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def sequences(self) -> Iterator[Sequence]:
        """All accepted sequences that have not ended."""
        return iter(self._sequences.values())

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.get(request_id)

    def outstanding_tokens(self) -> int:
        """Tokens that are still to be computed if every sequence runs to its limit."""
        return sum(
            self._final_length(sequence) - 1 - sequence.num_computed_tokens for sequence in self.sequences()
        )

    # ------------------------------------------------------------------ in and out

    def add(self, sequence: Sequence, *, is_deferred: bool = False) -> None:
        """Queues a sequence. Raises Refusal if it could never run, or if the queue is full.

        One that is deferred is not run before `undefer`.
        """
        if sequence.request_id in self._sequences:
            raise Refusal("invalid_request", f"request id {sequence.request_id!r} is in use", "request_id")
        if sequence.num_output_tokens >= sequence.sampling.max_tokens:
            raise Refusal("invalid_request", "all of max_tokens were generated already", "output_token_ids")
        if sequence.num_tokens >= self._max_model_len:
            raise Refusal(
                "context_length_exceeded",
                f"the prompt has {sequence.num_tokens} tokens; with at least one token of output the model "
                f"takes at most {self._max_model_len - 1}",
                "prompt",
            )
        # The last token of a sequence is never computed. A sequence that fits into the whole pool
        # always ends: all others yield to the oldest. One that does not fit would preempt for ever.
        num_blocks = self._pool.num_blocks_for(self._final_length(sequence) - 1)
        if num_blocks > self._pool.num_blocks:
            raise Refusal(
                "context_length_exceeded",
                f"{sequence.num_tokens} tokens and max_tokens {sequence.sampling.max_tokens} may need "
                f"{num_blocks} KV blocks; the engine has {self._pool.num_blocks}",
                "max_tokens",
            )
        if self.num_waiting >= self._max_queued_requests:
            raise Refusal("queue_full", f"{self.num_waiting} requests are waiting already")
        # A long prompt is refused for what waits before it, never for its own length.
        if self.num_waiting and self._num_queued_tokens + sequence.num_tokens > self._max_queued_tokens:
            raise Refusal("queue_full", f"{self._num_queued_tokens} tokens are waiting already")
        self._num_queued_tokens += sequence.num_tokens
        self._sequences[sequence.request_id] = sequence
        if is_deferred:
            self._deferred[sequence.request_id] = sequence
        else:
            self._waiting.add(sequence)

    def undefer(self, sequence: Sequence) -> None:
        """The sequence lacks nothing any more."""
        del self._deferred[sequence.request_id]
        self._waiting.add(sequence)

    def abort(self, request_id: RequestId) -> Sequence | None:
        """Ends a sequence now, and returns it; None if it has ended or was never known."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort")
        return sequence

    def drop_expired(self, now_s: float) -> list[Sequence]:
        """Ends the sequences whose deadline has passed, before they cost another step."""
        expired = [
            sequence
            for sequence in self.sequences()
            if sequence.deadline_s is not None and sequence.deadline_s <= now_s
        ]
        for sequence in expired:
            self._end(sequence, "abort")
        return expired

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; returns how many blocks they had. At any moment between calls.

        Nothing that was computed or planned before can be found afterwards: a sequence that runs keeps
        its blocks and goes on with them, but publishes none that stand on what came before the reset.
        """
        for sequence in self._running:
            sequence.may_publish = False
        return self._pool.reset_prefix_cache()

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan | None:
        """Plans a step and takes the blocks that it writes to; None when there is nothing to compute.

        A plan must be followed by its `update` before the next `schedule`.
        """
        assert self._planned is None, "the last plan was not updated"
        self._num_plans += 1
        self._make_room_for_head()
        num_preemptions = self.num_preemptions
        self._preempt_if_forced()
        rows = self._schedule_running()
        budget = self._max_num_batched_tokens - sum(row.num_tokens for row in rows)
        if self.num_preemptions == num_preemptions:  # else there is no room for anybody
            rows += self._admit_waiting(budget)
        if not rows:
            return None
        self._planned = StepPlan(rows, sum(row.num_tokens for row in rows))
        return self._planned

    def update(self, plan: StepPlan, sampled: list[Sampled | None]) -> list[tuple[Sequence, list[Sampled]]]:
        """Takes in what a step computed: new tokens, newly full blocks, ended sequences.

        Returns the sequences that grew with their new tokens, in row order. Rows whose sequence was
        aborted since the plan was made are passed over.
        """
        assert plan is self._planned, "update of a plan that is not the last one"
        assert len(sampled) == len(plan.rows), f"{len(sampled)} results for {len(plan.rows)} rows"
        self._planned = None
        grown: list[tuple[Sequence, list[Sampled]]] = []
        for row, result in zip(plan.rows, sampled, strict=True):
            sequence = row.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            assert row.samples == (result is not None), f"{sequence.request_id}: token only of a last chunk"
            self._publish_computed(sequence, row)
            if result is not None:
                sequence.token_ids.append(result.token_id)
                self._waiting.generated(sequence, 1)
                grown.append((sequence, [result]))
                self._end_if_complete(sequence, result.token_id)
        return grown

    def _make_room_for_head(self) -> None:
        """Lets running sequences yield to a waiting one, if the policy wants it, before anybody has a row."""
        head = self._waiting.head()
        while head is not None and not self._fits(head, self._cached_prefix(head)):
            victim = self._waiting.yields_to(head, self._running)
            if victim is None:
                return
            self._preempt(victim)

    def _schedule_running(self) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        budget = self._max_num_batched_tokens
        # One token for each sequence that decodes, whatever prompts stand before it.
        num_decoding = sum(1 for sequence in self._running if _num_missing(sequence) == 1)
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            is_decoding = _num_missing(sequence) == 1
            num_tokens = self._chunk_of(sequence, budget if is_decoding else budget - num_decoding)
            if num_tokens <= 0:
                index += 1  # a prompt whose turn comes when fewer decode
            elif self._grow_table(sequence, num_tokens):
                rows.append(ScheduledRow(sequence, sequence.num_computed_tokens, num_tokens))
                budget -= num_tokens
                num_decoding -= is_decoding
                index += 1
            else:
                # Victims come from those without a row, so no row has to be taken back. The victim
                # may be `sequence` itself; either way the list gets shorter and the loop ends.
                victim = self._waiting.victim(self._running[index:])
                num_decoding -= _num_missing(victim) == 1
                self._preempt(victim)
        return rows

    def _admit_waiting(self, budget: int) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        while budget > 0:
            sequence = self._waiting.head()
            if sequence is None or not self._admit(sequence):
                break  # no overtaking: a small request must not starve a large one
            num_tokens = self._chunk_of(sequence, budget)
            grew = self._grow_table(sequence, num_tokens)
            assert grew, "admission has checked the blocks"
            rows.append(ScheduledRow(sequence, sequence.num_computed_tokens, num_tokens))
            budget -= num_tokens
        return rows

    def _admit(self, sequence: Sequence) -> bool:
        """Moves the sequence to the running ones, on top of its cached prefix, if it fits."""
        cached = self._cached_prefix(sequence)
        if not self._fits(sequence, cached):
            return False
        self._waiting.remove(sequence)
        self._num_queued_tokens -= sequence.num_tokens
        self._waiting.admitted(sequence)
        self._pool.hold(cached)
        sequence.block_ids.extend(cached)
        sequence.num_computed_tokens = len(cached) * self._pool.block_size
        sequence.may_publish = True
        sequence.state = SequenceState.RUNNING
        self._running.append(sequence)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.prefix_cache_queries += sequence.num_tokens if self._enable_prefix_caching else 0
            self.prefix_cache_hits += sequence.num_computed_tokens
        return True

    def _fits(self, sequence: Sequence, cached: list[BlockId]) -> bool:
        """Room for all tokens, not only for the first chunk, and one block more for each sequence that
        runs: else the next step would preempt what this one has admitted."""
        num_needed = self._pool.num_blocks_for(sequence.num_tokens) - len(cached)
        num_left = self._pool.num_free_blocks - self._pool.num_free_among(cached) - num_needed
        return len(self._running) < self._max_num_seqs and num_left >= len(self._running)

    def _chunk_of(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a sequence that the next step computes."""
        is_alone = len(self._sequences) == 1
        return min(_num_missing(sequence), budget, budget if is_alone else self._max_row_tokens)

    def _cached_prefix(self, sequence: Sequence) -> list[BlockId]:
        if not self._enable_prefix_caching:
            return []
        extend_block_hashes(sequence, self._pool.block_size)
        # Never all tokens: the last one has to be computed to get the logits after it.
        num_blocks = (sequence.num_tokens - 1) // self._pool.block_size
        return self._pool.cached_prefix(sequence.block_hashes[:num_blocks])

    # ------------------------------------------------------------------ changes of one sequence

    def _grow_table(self, sequence: Sequence, num_tokens: int) -> bool:
        """Takes the blocks for the next `num_tokens` tokens; False and none if too few are free."""
        num_blocks = self._pool.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        num_missing = num_blocks - len(sequence.block_ids)
        if num_missing > self._pool.num_free_blocks:
            return False
        sequence.block_ids.extend(self._pool.take(num_missing))
        return True

    def _publish_computed(self, sequence: Sequence, row: ScheduledRow) -> None:
        sequence.num_computed_tokens = row.start + row.num_tokens
        if self._enable_prefix_caching and sequence.may_publish:
            block_size = self._pool.block_size
            extend_block_hashes(sequence, block_size)
            for index in range(row.start // block_size, sequence.num_computed_tokens // block_size):
                self._pool.publish(sequence, index)

    def _end_if_complete(self, sequence: Sequence, token_id: int) -> None:
        sampling = sequence.sampling
        is_stop_token = token_id in sampling.stop_token_ids or (
            token_id in self._eos_token_ids and not sampling.ignore_eos
        )
        if is_stop_token and sequence.num_output_tokens >= sampling.min_tokens:
            sequence.stop_token_id = token_id
            self._end(sequence, "stop")
        elif sequence.grammar is not None and self._end_by_grammar(sequence, sequence.grammar, token_id):
            pass
        elif sequence.num_tokens >= self._final_length(sequence):
            self._end(sequence, "length")

    def _end_by_grammar(self, sequence: Sequence, grammar: GrammarState, token_id: int) -> bool:
        """Advances the grammar; whether that has ended the sequence: it is complete, or it has failed."""
        try:
            grammar.accept(token_id)
        except Refusal as refusal:
            sequence.refusal = refusal
            self._end(sequence, "abort")
            return True
        if grammar.is_complete:
            # An end-of-sequence token came although it was not wanted yet: nothing else could.
            sequence.stop_token_id = token_id if token_id in self._eos_token_ids else None
            self._end(sequence, "stop")
        return grammar.is_complete

    def _final_length(self, sequence: Sequence) -> int:
        """Tokens of the sequence, prompt included, when it runs to its limit."""
        return min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, self._max_model_len)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        else:
            self._num_queued_tokens -= sequence.num_tokens
            if sequence.request_id not in self._deferred:
                self._waiting.remove(sequence)
        if self._deferred.pop(sequence.request_id, None) is None:
            self._waiting.ended(sequence)
        del self._sequences[sequence.request_id]
        self._forced_at.pop(sequence.request_id, None)
        self._release(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything back; the sequence starts over, on whatever the cache still holds by then."""
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._num_queued_tokens += sequence.num_tokens
        self._waiting.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.block_ids.clear()

    def _preempt_if_forced(self) -> None:
        if self._force_preemption_every and self._num_plans % self._force_preemption_every == 0:
            # Once per length of a sequence: else a prompt longer than the chunks of k steps never ends.
            candidates = [s for s in self._running if self._forced_at.get(s.request_id) != s.num_tokens]
            if candidates:
                victim = self._waiting.victim(candidates)
                self._forced_at[victim.request_id] = victim.num_tokens
                self._preempt(victim)

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Asserts that queues, states and block tables agree, and that no block is lost or shared wrongly."""
        waiting = [*self._waiting, *self._deferred.values()]
        num_queued_tokens = sum(sequence.num_tokens for sequence in waiting)
        assert num_queued_tokens == self._num_queued_tokens, "the tokens that wait are miscounted"
        held = {id(sequence) for sequence in (*self._running, *waiting)}
        assert len(held) == len(self._running) + len(waiting), "a sequence is in two places"
        assert held == {id(sequence) for sequence in self.sequences()}, "a sequence is in no queue"
        assert len(self._running) <= self._max_num_seqs, "more sequences run than max_num_seqs"
        for sequence in waiting:
            assert sequence.state is SequenceState.WAITING, f"{sequence.request_id} waits as {sequence.state}"
            assert not sequence.block_ids, f"{sequence.request_id} waits and holds blocks"
            assert sequence.num_computed_tokens == 0, (
                f"{sequence.request_id} waits and counts computed tokens"
            )
        planned = {id(row.sequence): row.num_tokens for row in (self._planned.rows if self._planned else ())}
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING, f"{sequence.request_id} runs as {sequence.state}"
            num_tokens = sequence.num_computed_tokens + planned.get(id(sequence), 0)
            assert num_tokens <= sequence.num_tokens, (
                f"{sequence.request_id} has computed what it does not have"
            )
            assert len(sequence.block_ids) == self._pool.num_blocks_for(num_tokens), (
                f"{sequence.request_id}: {len(sequence.block_ids)} blocks for {num_tokens} tokens"
            )
        self._pool.check(sequence.block_ids for sequence in self._running)
