"""Which tokens of which sequences the next step computes.

There is no prefill or decode phase. Each sequence has `num_computed_tokens` chasing `num_tokens`;
a step hands out a budget of tokens, to the running sequences first, then to waiting ones.

A plan counts as computed at once. So the next step can be planned before the result of this one is known:
it counts on one more token of each sequence that samples (`num_pending_tokens`). A sequence may turn out
to have ended with that token; its row of the next step is stale then, and was computed for nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from engine_service.block_pool import BlockPool
from engine_service.block_tables import BlockTables, CachedPrefix
from engine_service.refusal import Refusal
from engine_service.request_queue import RequestQueue
from engine_service.runner import RowResults, Sampled
from engine_service.scheduling_policy import FirstComeFirstServed, SchedulingPolicy
from engine_service.sequence import ScheduledRow, Sequence, SequenceState, StepPlan
from engine_service.step_limits import FixedLimits, StepLimits
from engine_service.structured_output.grammar import GrammarState
from shared.identifiers import RequestId
from shared.messages import FinishReason, TokenLogprobs

MAX_PLANS_AHEAD = 2  # of results that were not taken in


class Scheduler:
    """Queues, admits, preempts and ends sequences.

    One caller: each `schedule` is followed by its `update`, in order; one more may be planned between
    them. `add` and `abort` may come at any moment between calls.
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
        limits: StepLimits | None = None,
        force_preemption_every: int = 0,
    ) -> None:
        """None bounds nothing, of `max_queued_tokens` (prompt tokens that wait) and of
        `long_prefill_token_threshold` (tokens of one prompt in one step, while there are other sequences).
        `limits` may lower `max_num_seqs` and `max_num_batched_tokens` as they find fit.
        `force_preemption_every` k > 0 preempts one sequence every k steps: for tests of that path.
        """
        self._tables = BlockTables(pool, enable_prefix_caching=enable_prefix_caching)
        self._enable_prefix_caching = enable_prefix_caching
        self._block_size = pool.block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_row_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._queue = RequestQueue(
            policy if policy is not None else FirstComeFirstServed(),
            max_requests=max_queued_requests,
            max_tokens=max_queued_tokens,
        )
        self._policy = self._queue.policy
        self.limits: StepLimits = limits or FixedLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._running: list[Sequence] = []  # in order of admission
        self._sequences: dict[RequestId, Sequence] = {}  # waiting, deferred and running
        # Of the step that is being planned:
        self._ends_chunks_with_blocks = False
        self._num_places = max_num_seqs  # for sequences that run, as far as the limits have a say
        self._planned: deque[StepPlan] = deque()  # whose result was not taken in
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
        return len(self._queue)

    @property
    def has_only_deferred(self) -> bool:
        """Whether there is something to do, but nothing that could be done now."""
        return 0 < self._queue.num_deferred == len(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        return self._tables.num_free_blocks

    @property
    def num_blocks(self) -> int:
        return self._tables.num_blocks

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
        return sum(s.final_length - 1 - s.num_computed_tokens for s in self.sequences())

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
        final_length = self.final_length_of(sequence)
        # A sequence that fits into the whole pool always ends: all others yield to the oldest. One that does
        # not fit would preempt for ever.
        num_blocks = self._tables.num_blocks_for(final_length - 1)
        if num_blocks > self._tables.num_blocks:
            raise Refusal(
                "context_length_exceeded",
                f"{sequence.num_tokens} tokens and max_tokens {sequence.sampling.max_tokens} may need "
                f"{num_blocks} KV blocks; the engine has {self._tables.num_blocks}",
                "max_tokens",
            )
        self._queue.add(sequence, is_deferred=is_deferred)
        sequence.final_length = final_length if sequence.search_id is None else sequence.num_tokens + 1
        self._sequences[sequence.request_id] = sequence

    def final_length_of(self, sequence: Sequence) -> int:
        """Tokens that it has when it runs to its limit; of a beam search, each of its results."""
        return min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, self._max_model_len)

    def end_token_ids_of(self, sequence: Sequence) -> frozenset[int]:
        """The tokens that end it."""
        ends = frozenset(sequence.sampling.stop_token_ids)
        return ends if sequence.sampling.ignore_eos else ends | self._eos_token_ids

    def go_on(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that go on where others of their beam search have just ended.

        They run at once if they find room, as whoever runs keeps its place. The others come before those
        that wait for their turn.
        """
        for sequence in sequences:
            assert sequence.goes_on, f"{sequence.request_id} does not go on with a beam search"
            sequence.final_length = sequence.num_tokens + 1
            self._sequences[sequence.request_id] = sequence
            prefix = self._tables.find_prefix(sequence)
            if self._fits(sequence, prefix):
                self._run(sequence, prefix)
            else:
                self._queue.go_on(sequence)

    def give_up(self, sequences: Iterable[Sequence]) -> None:
        """Sequences of a beam search that have just ended, and that none goes on with.

        The ends of what they left in the cache would only drive out what others may want again.
        """
        for sequence in sequences:
            self._tables.forget_tail(sequence)

    def close_search(self, first: Sequence) -> None:
        """The beam search that began with this sequence is over; none of its sequences is left."""
        self._queue.close_search(first)

    def undefer(self, sequence: Sequence) -> None:
        """The sequence lacks nothing any more."""
        self._queue.undefer(sequence)

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
        """Forgets all cached prefixes, see BlockTables; returns how many blocks they had."""
        return self._tables.reset_prefix_cache(self._running)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan | None:
        """Plans a step and takes the blocks that it writes to; None when there is nothing to compute."""
        assert len(self._planned) < MAX_PLANS_AHEAD, "too many plans without a result"
        self._num_plans += 1
        # Limits that have become lower throw nobody out. So one that is let in may only replace another one.
        self._num_places = max(self.limits.max_num_seqs, len(self._running))
        self._make_room_for_head()
        num_preemptions = self.num_preemptions
        self._preempt_if_forced()
        # One token for each sequence that decodes, whatever prompts stand before it.
        num_decoding = sum(1 for sequence in self._running if sequence.num_missing_tokens == 1)
        num_prompts = len(self._running) - num_decoding + len(self._policy)
        self._ends_chunks_with_blocks = num_prompts > 1
        budget = max(num_decoding, self.limits.max_num_tokens(num_decoding))
        budget = min(budget, self._max_num_batched_tokens)
        rows = self._schedule_running(budget, num_decoding)
        if self.num_preemptions == num_preemptions:  # else there is no room for anybody
            self._admit_waiting(budget, rows)
        if not rows:
            return None
        plan = StepPlan(rows, sum(row.num_tokens for row in rows), self._tables.finish_plan())
        self._planned.append(plan)
        return plan

    def update(self, plan: StepPlan, results: RowResults) -> list[tuple[Sequence, list[Sampled]]]:
        """Takes in what a step computed: new tokens, ended sequences, log-probabilities of prompts.

        Returns the sequences that grew with their new tokens, in row order. Rows whose sequence has ended or
        was preempted since the plan was made are passed over.
        """
        assert self._planned, "update without a plan"
        assert plan is self._planned[0], "update of a plan that is not the next one"
        sampled = results.sampled
        assert len(sampled) == len(plan.rows), f"{len(sampled)} results for {len(plan.rows)} rows"
        self._planned.popleft()
        for index, found in results.prompt_logprobs.items():
            if not plan.rows[index].is_stale:
                _take_prompt_logprobs(plan.rows[index], found)
        grown: list[tuple[Sequence, list[Sampled]]] = []
        for row, result in zip(plan.rows, sampled, strict=True):
            if row.is_stale:
                continue
            sequence = row.sequence
            assert row.samples == (result is not None), f"{sequence.request_id}: token only of a last chunk"
            if result is None:
                continue
            if row.num_tokens > 1:
                self._tables.publish_tail(sequence)
            sequence.token_ids.append(result.token_id)
            sequence.num_pending_tokens -= 1
            self._tables.publish(sequence)
            self._policy.generated(sequence, 1)
            grown.append((sequence, [result]))
            self._end_if_complete(sequence, result.token_id)
        return grown

    def _make_room_for_head(self) -> None:
        """Lets running sequences yield to a waiting one, if the policy wants it, before anybody has a row."""
        head = self._queue.head()
        while head is not None and not self._fits(head, self._tables.find_prefix(head)):
            victim = self._policy.yields_to(head, self._running)
            if victim is None:
                return
            self._preempt(victim)

    def _schedule_running(self, budget: int, num_decoding: int) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            is_decoding = sequence.num_missing_tokens == 1
            if is_decoding:
                num_tokens = 1
            else:
                self._tables.skip_cached(sequence)
                num_tokens = self._chunk_of(sequence, budget - num_decoding)
            if num_tokens <= 0:
                index += 1  # a prompt whose turn comes when fewer decode, or nothing to do for now
            elif self._tables.grow(sequence, num_tokens):
                rows.append(self._plan_row(sequence, num_tokens))
                budget -= num_tokens
                num_decoding -= is_decoding
                index += 1
            else:
                # Victims come from those without a row, so no row has to be taken back. The victim
                # may be `sequence` itself; either way the list gets shorter and the loop ends.
                victim = self._policy.victim(self._running[index:])
                num_decoding -= victim.num_missing_tokens == 1
                self._preempt(victim)
        return rows

    def _admit_waiting(self, step_budget: int, rows: list[ScheduledRow]) -> None:
        """Adds to `rows`, which the running ones have."""
        budget = step_budget - sum(row.num_tokens for row in rows)
        while budget > 0 and (sequence := self._queue.head()) is not None:
            prefix = self._tables.find_prefix(sequence)
            # No overtaking: a small request must not starve a large one.
            if not self._fits(sequence, prefix) or self._waits_to_be_whole(
                sequence, prefix, budget, step_budget
            ):
                break
            self._queue.admit(sequence)
            self._run(sequence, prefix)
            num_tokens = self._chunk_of(sequence, budget)
            grew = self._tables.grow(sequence, num_tokens)
            assert grew, "admission has checked the blocks"
            rows.append(self._plan_row(sequence, num_tokens))
            budget -= num_tokens

    def _waits_to_be_whole(
        self, sequence: Sequence, prefix: CachedPrefix, budget: int, step_budget: int
    ) -> bool:
        """Whether the next step is sure to take all that is missing, where this one would take a part.

        A part would make this step longer for everybody in it, and the first token come no sooner. `budget`
        is what is left of `step_budget`. Nobody waits so in a step of decoding rows alone: what they leave is
        what fits.
        """
        num_cached = len(prefix.block_ids) * self._block_size + prefix.num_tail_tokens
        num_missing = sequence.num_missing_tokens - num_cached
        fits_whole = num_missing <= min(self._max_row_tokens, step_budget - len(self._running))
        return (
            budget < num_missing
            and fits_whole
            and all(each.num_missing_tokens <= 1 for each in self._running)
        )

    def _run(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        self._tables.start(sequence, prefix)
        sequence.state = SequenceState.RUNNING
        self._running.append(sequence)
        if sequence.num_preemptions == 0 and not sequence.goes_on:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            if self._enable_prefix_caching and sequence.reads_cache:
                self.prefix_cache_queries += sequence.num_tokens
            self.prefix_cache_hits += sequence.num_computed_tokens

    def _fits(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Room for all tokens, not only for the first chunk, and one block more for each sequence that
        runs: else the next step would preempt what this one has admitted."""
        num_running = len(self._running)
        return (
            num_running < min(self._max_num_seqs, self._num_places)
            and self._tables.num_free_after(sequence, prefix) >= num_running
        )

    def _chunk_of(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a sequence that the next step computes; none if not positive."""
        num_missing = sequence.num_missing_tokens
        is_alone = len(self._sequences) == 1
        num_tokens = min(num_missing, budget, budget if is_alone else self._max_row_tokens)
        if num_tokens < num_missing and self._ends_chunks_with_blocks:
            # So the next block can be left to whoever shares the prompt, see BlockTables.skip_cached. What
            # the chunk loses by that, another prompt gets.
            num_over = (sequence.num_computed_tokens + num_tokens) % self._block_size
            num_tokens -= num_over if num_over < num_tokens else 0
        return num_tokens

    # ------------------------------------------------------------------ changes of one sequence

    def _plan_row(self, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        """From here on the tokens count as computed."""
        samples = num_tokens == sequence.num_missing_tokens
        start = sequence.num_computed_tokens
        row = ScheduledRow(sequence, start, num_tokens, samples, sequence.num_preemptions)
        sequence.num_computed_tokens = start + num_tokens
        sequence.num_pending_tokens += samples
        self._tables.publish(sequence)
        return row

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
        elif sequence.num_tokens >= sequence.final_length:
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

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._queue.ended(sequence)
            self._tables.publish_tail(sequence)
        else:
            self._queue.drop(sequence)
        del self._sequences[sequence.request_id]
        self._forced_at.pop(sequence.request_id, None)
        self._tables.release(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything back; the sequence starts over, on whatever the cache still holds by then.

        A pending token is dropped: it comes again, as a sample is a function of the history.
        """
        self._running.remove(sequence)
        self._tables.release(sequence)
        sequence.num_pending_tokens = 0
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._queue.put_back(sequence)

    def _preempt_if_forced(self) -> None:
        if self._force_preemption_every and self._num_plans % self._force_preemption_every == 0:
            # Once per length of a sequence: else a prompt longer than the chunks of k steps never ends.
            candidates = [s for s in self._running if self._forced_at.get(s.request_id) != s.num_tokens]
            if candidates:
                victim = self._policy.victim(candidates)
                self._forced_at[victim.request_id] = victim.num_tokens
                self._preempt(victim)

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Asserts that queues, states and block tables agree, and that no block is lost or shared wrongly."""
        self._queue.check()
        waiting = list(self._queue)
        held = {id(sequence) for sequence in (*self._running, *waiting)}
        assert len(held) == len(self._running) + len(waiting), "a sequence is in two places"
        assert held == {id(sequence) for sequence in self.sequences()}, "a sequence is in no queue"
        assert len(self._running) <= self._max_num_seqs, "more sequences run than max_num_seqs"
        for sequence in waiting:
            assert sequence.state is SequenceState.WAITING, f"{sequence.request_id} waits as {sequence.state}"
            assert not sequence.block_ids, f"{sequence.request_id} waits and holds blocks"
            assert sequence.num_computed_tokens == sequence.num_pending_tokens == 0, (
                f"{sequence.request_id} waits and counts on computed tokens"
            )
        pending = Counter(
            id(row.sequence)
            for plan in self._planned
            for row in plan.rows
            if row.samples and not row.is_stale
        )
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING, f"{sequence.request_id} runs as {sequence.state}"
            assert sequence.num_missing_tokens >= 0, (
                f"{sequence.request_id} has computed what it does not have"
            )
            assert sequence.num_pending_tokens == pending[id(sequence)], (
                f"{sequence.request_id} waits for {sequence.num_pending_tokens} tokens that no step samples"
            )
        self._tables.check(self._running)


def _take_prompt_logprobs(row: ScheduledRow, found: list[TokenLogprobs]) -> None:
    """What of it is new: a sequence that was preempted computes some of its prompt once more."""
    sequence = row.sequence
    num_known = sequence.num_scored_tokens - row.start
    assert num_known >= 0, f"{sequence.request_id} has computed prompt tokens without telling of them"
    sequence.prompt_logprobs += found[num_known:]
    sequence.num_scored_tokens = max(sequence.num_scored_tokens, row.start + len(found))
