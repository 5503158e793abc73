"""One model at work: requests in, tokens out, step by step. No sockets, no threads."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from engine_service.beam_search import BeamSearch
from engine_service.kv_events import KvEventRecorder
from engine_service.refusal import Refusal
from engine_service.runner import Runner, Sampled
from engine_service.scheduler import Scheduler
from engine_service.sequence import Sequence, StepPlan
from engine_service.step_execution import InlineExecution, RunningStep, StepExecution
from engine_service.structured_output.grammar import Grammar, refused
from engine_service.structured_output.grammar_desk import GrammarDesk
from shared.errors import InvalidRequest
from shared.identifiers import RequestId, TenantId
from shared.messages import EngineLoad, FinishReason, SequenceUpdate, Submit


@dataclass(slots=True, eq=False)
class Timeline:
    """When things happened to one request, on the engine's monotonic clock; None: it did not."""

    request_id: RequestId
    tenant: TenantId
    trace_context: dict[str, str]
    queued_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class StepOutcome:
    """What one step changed: at most one update per sequence; timelines of the sequences it ended.

    A sequence that turned out to be one the engine cannot run has a refusal instead of its update.
    """

    updates: list[SequenceUpdate] = field(default_factory=list)
    refusals: list[tuple[RequestId, Refusal]] = field(default_factory=list)
    finished: list[Timeline] = field(default_factory=list)
    did_compute: bool = False  # False: nothing could be planned


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """Planned and on its way; its result was not taken in."""

    plan: StepPlan
    running: RunningStep
    planned_s: float


def _no_aborts() -> Iterable[RequestId]:
    return ()


class Engine:
    """A scheduler and a runner. Not thread-safe: everything is called from the thread that steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Any],
        *,
        vocab_size: int,
        grammars: GrammarDesk | None = None,
        kv_events: KvEventRecorder | None = None,
        execution: StepExecution | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `grammars`, requests for structured output are refused.

        `kv_events` listens to the scheduler's block pool, and is flushed after each step. `execution`: where
        steps are computed and how many are planned ahead; None: here, one after the other.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._execution = execution or InlineExecution()
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_result_s = -math.inf
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._kv_events = kv_events
        self._clock = clock
        self._timelines: dict[RequestId, Timeline] = {}
        # Those that wait until the first of their request has computed the prompt that they share.
        self._followers: dict[RequestId, list[Sequence]] = {}
        self._searches: dict[RequestId, BeamSearch] = {}
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

    @property
    def only_awaits_grammars(self) -> bool:
        """Whether a step would compute nothing, since all that is there to do waits for a grammar."""
        return self._scheduler.has_only_deferred and not self._in_flight

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, by another thread, when a grammar is ready."""
        if self._grammars is not None:
            self._grammars.wake_with(wake)

    def close(self) -> None:
        """Ends what runs beside the steps. Steps that are on their way are not waited for."""
        self._execution.close()
        if self._grammars is not None:
            self._grammars.close()

    def add(self, submit: Submit, received_s: float | None = None) -> None:
        """Queues a request, whose timeout runs from `received_s`. Raises Refusal."""
        now_s = self._clock() if received_s is None else received_s
        self._check_submit(submit)
        grammar = self._find_grammar(submit)
        sequence = Sequence(
            request_id=submit.request_id,
            token_ids=[*submit.prompt_token_ids, *submit.output_token_ids],
            num_prompt_tokens=len(submit.prompt_token_ids),
            sampling=submit.sampling,
            tenant=submit.tenant,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            arrival_s=now_s,
            deadline_s=None if submit.timeout_s is None else now_s + submit.timeout_s,
            grammar=grammar.start(submit.output_token_ids) if grammar is not None else None,
        )
        search = BeamSearch(self._scheduler, sequence) if submit.sampling.beam_search is not None else None
        form = submit.sampling.structured_output
        leader_id = submit.shares_prompt_with
        is_follower = search is None and leader_id is not None and self._awaits_first_token(leader_id)
        awaits_grammar = form is not None and grammar is None
        self._scheduler.add(sequence, is_deferred=awaits_grammar or is_follower)
        if is_follower and leader_id is not None:
            self._followers.setdefault(leader_id, []).append(sequence)
        if self._grammars is not None and form is not None and grammar is None:
            self._grammars.order(submit.request_id, form, self._clock())
        if search is not None:
            self._searches[submit.request_id] = search
        self._timelines[submit.request_id] = Timeline(
            submit.request_id, submit.tenant, submit.trace_context, queued_s=now_s
        )

    def abort(self, request_id: RequestId) -> Timeline | None:
        """Ends a request and frees what it holds; None if it has ended or was never known."""
        if (search := self._searches.get(request_id)) is not None:
            search.abort()
            return self._finish(search.first)
        sequence = self._scheduler.abort(request_id)
        return self._finish(sequence) if sequence is not None else None

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes, for requests to come; those that run are not disturbed.

        Returns how many blocks were forgotten. May be called where aborts are polled, too.
        """
        num_forgotten = self._scheduler.reset_prefix_cache()
        self._flush_kv_events()
        return num_forgotten

    def step(self, poll_aborts: Callable[[], Iterable[RequestId]] = _no_aborts) -> StepOutcome:
        """Takes in the result of one forward pass, if there is anything to compute.

        While it computes, as many more are planned as the execution allows. `poll_aborts` is asked right
        after the model has returned, when a step's worth of time has passed since the last look: what is
        aborted there gets no more tokens. Only its timelines are in the outcome, since nobody waits for
        updates of it. A step that fails raises, and leaves an engine that cannot be used any more.
        """
        outcome = StepOutcome()
        while len(self._in_flight) < self._execution.max_steps_in_flight:
            plan = self._plan(outcome)
            if plan is None:
                break
            self._in_flight.append(self._launch(plan))
        if self._in_flight:
            self._take_in(self._in_flight.popleft(), poll_aborts, outcome)
        return outcome

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        limits = scheduler.limits.report()
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.num_free_blocks,
            num_blocks=scheduler.num_blocks,
            outstanding_tokens=scheduler.outstanding_tokens()
            + sum(search.num_tokens_to_come for search in self._searches.values()),
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            max_num_seqs_now=limits.max_num_seqs,
            max_num_tokens_now=limits.max_num_tokens,
            decode_step_p95_ms=limits.decode_step_p95_ms,
            meets_itl_target=limits.meets_target,
        )

    def check(self) -> None:
        """Asserts the invariants of all parts."""
        self._scheduler.check()
        accepted = {sequence.owner_id for sequence in self._scheduler.sequences()}
        assert accepted == set(self._timelines), "a timeline without its sequence, or the reverse"
        for search in self._searches.values():
            search.check()

    def _plan(self, outcome: StepOutcome) -> StepPlan | None:
        """The next step, after what has ended or become ready meanwhile."""
        expired = {sequence.owner_id: sequence for sequence in self._scheduler.drop_expired(self._clock())}
        for request_id, sequence in expired.items():
            outcome.updates.append(SequenceUpdate(request_id, [], finish_reason="abort"))
            # Of a beam search there may be more to end.
            outcome.finished.append(self.abort(request_id) or self._finish(sequence))
        self._take_grammars(outcome)
        return self._scheduler.schedule()

    def _launch(self, plan: StepPlan) -> _StepInFlight:
        now_s = self._clock()
        for row in plan.rows:
            timeline = self._timelines[row.sequence.owner_id]
            if timeline.scheduled_s is None:
                timeline.scheduled_s = now_s
        return _StepInFlight(plan, self._execution.start(self._runner, self._runner.prepare(plan)), now_s)

    def _take_in(
        self, step: _StepInFlight, poll_aborts: Callable[[], Iterable[RequestId]], outcome: StepOutcome
    ) -> None:
        results = step.running.result()
        now_s = self._clock()
        self._scheduler.limits.observe(step.plan, now_s - max(step.planned_s, self._last_result_s))
        self._last_result_s = now_s
        outcome.did_compute = True
        self._num_steps += 1
        for request_id in poll_aborts():
            if (timeline := self.abort(request_id)) is not None:
                outcome.finished.append(timeline)
        for sequence, new_tokens in self._scheduler.update(step.plan, results):
            if sequence.search_id is not None:
                self._go_on(self._searches[sequence.search_id], sequence, new_tokens, outcome)
                continue
            if sequence.refusal is None:
                outcome.updates.append(self._update_of(sequence, new_tokens))
            else:
                outcome.refusals.append((sequence.request_id, sequence.refusal))
            if sequence.finish_reason is not None:
                outcome.finished.append(self._finish(sequence))
            elif self._followers:
                self._release_followers(sequence.request_id)
        step.running.history_is_known()
        self._flush_kv_events()

    def _go_on(
        self, search: BeamSearch, sequence: Sequence, new_tokens: list[Sampled], outcome: StepOutcome
    ) -> None:
        """With a beam search, of which a sequence has got its token."""
        (token,) = new_tokens
        first = search.first
        has_ended = search.take(sequence, token)
        is_first = self._count(first, 1)
        if is_first or has_ended:
            outcome.updates.append(
                SequenceUpdate(
                    first.request_id,
                    [],
                    finish_reason=first.finish_reason if has_ended else None,
                    num_cached_tokens=first.num_cached_tokens if is_first else 0,
                    beams=search.beams if has_ended else [],
                )
            )
        if has_ended:
            outcome.finished.append(self._finish(first))
        else:
            self._release_followers(first.request_id)

    def _flush_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.flush()

    def _check_submit(self, submit: Submit) -> None:
        """What the scheduler and the runner rely on; the gateway has told the client before, in its words."""
        if not submit.prompt_token_ids:
            raise Refusal("invalid_request", "the prompt has no tokens", "prompt")
        for name, token_ids in (
            ("prompt", submit.prompt_token_ids),
            ("output_token_ids", submit.output_token_ids),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
                raise Refusal("invalid_request", f"a token id is not below {self._vocab_size}", name)
        if submit.sampling.beam_search is not None and submit.output_token_ids:
            raise Refusal("invalid_request", "a beam search cannot be continued", "output_token_ids")
        if submit.timeout_s is not None and math.isnan(submit.timeout_s):
            raise Refusal("invalid_request", "timeout_s is not a number", "timeout_s")
        try:
            submit.sampling.check(self._vocab_size)
        except InvalidRequest as error:
            raise Refusal("invalid_request", error.message, error.param) from error

    def _find_grammar(self, submit: Submit) -> Grammar | None:
        """The grammar that the output must follow; None if there is none, or none yet. Raises Refusal."""
        form = submit.sampling.structured_output
        if form is None:
            return None
        if self._grammars is None:
            raise refused("this engine does not do structured output")
        return self._grammars.find(form)

    def _take_grammars(self, outcome: StepOutcome) -> None:
        """Lets those sequences into the queue whose grammar has come; those whose did not, end."""
        if self._grammars is None:
            return
        for request_id, grammar in self._grammars.take_ready(self._clock()):
            sequence = self._scheduler.get(request_id)
            assert sequence is not None, f"{request_id} has ended and still waits for a grammar"
            try:
                if isinstance(grammar, Refusal):
                    raise grammar
                sequence.grammar = grammar.start(sequence.token_ids[sequence.num_prompt_tokens :])
                if not self._is_follower(sequence):
                    self._scheduler.undefer(sequence)
            except Refusal as refusal:
                self._scheduler.abort(request_id)
                outcome.refusals.append((request_id, refusal))
                outcome.finished.append(self._finish(sequence))

    def _awaits_first_token(self, request_id: RequestId) -> bool:
        timeline = self._timelines.get(request_id)
        return timeline is not None and timeline.first_token_s is None

    def _is_follower(self, sequence: Sequence) -> bool:
        return any(sequence in followers for followers in self._followers.values())

    def _release_followers(self, request_id: RequestId) -> None:
        """The prompt is computed, or will not be: those who shared it take their turn."""
        for sequence in self._followers.pop(request_id, ()):
            has_ended = sequence.finish_reason is not None
            awaits_grammar = sequence.sampling.structured_output is not None and sequence.grammar is None
            if not (has_ended or awaits_grammar):
                self._scheduler.undefer(sequence)

    def _update_of(self, sequence: Sequence, new_tokens: list[Sampled]) -> SequenceUpdate:
        is_first = self._count(sequence, len(new_tokens))
        return SequenceUpdate(
            sequence.request_id,
            [token.token_id for token in new_tokens],
            finish_reason=sequence.finish_reason,
            stop_token_id=sequence.stop_token_id,
            num_cached_tokens=sequence.num_cached_tokens if is_first else 0,
            logprobs=[token.logprobs for token in new_tokens if token.logprobs is not None],
            prompt_logprobs=sequence.take_prompt_logprobs() if is_first else [],
        )

    def _count(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Takes note of new tokens of a request; whether they are its first ones."""
        timeline = self._timelines[sequence.request_id]
        is_first = timeline.first_token_s is None
        if is_first:
            timeline.first_token_s = self._clock()
            self._prompt_tokens += sequence.num_prompt_tokens
            assert not sequence.scores_prompt, f"{sequence.request_id} goes on, and its prompt is not scored"
        self._generation_tokens += num_new_tokens
        return is_first

    def _finish(self, sequence: Sequence) -> Timeline:
        self._searches.pop(sequence.request_id, None)
        if self._grammars is not None:
            self._grammars.cancel(sequence.request_id)
        self._release_followers(sequence.request_id)
        timeline = self._timelines.pop(sequence.request_id)
        timeline.finished_s = self._clock()
        timeline.num_prompt_tokens = sequence.num_prompt_tokens
        timeline.num_output_tokens = sequence.num_output_tokens
        timeline.num_cached_tokens = sequence.num_cached_tokens
        timeline.num_preemptions = sequence.num_preemptions
        timeline.finish_reason = sequence.finish_reason
        return timeline
