"""One request from its reservation to its settlement: the owner of everything it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from opentelemetry import trace

from gateway.balancer import Balancer, Choice
from gateway.engine_link import EngineLink, EngineLostError, EngineRejectedError, cost_of
from gateway.engine_pool import EnginePool
from gateway.errors import (
    ApiError,
    context_length_exceeded,
    invalid_request,
    overloaded,
    timed_out,
    unavailable,
    upstream_error,
)
from gateway.mailbox import Mailbox, MailboxOverflowError, PendingUpdate
from gateway.scored_token import ScoredToken, score
from shared.detokenizer import IncrementalDetokenizer
from shared.identifiers import RequestId, TenantId, fresh_request_id
from shared.messages import FinishReason, Reject, Submit, TokenLogprobs
from shared.sampling import MAX_SEED, SamplingParams
from shared.telemetry import inject
from shared.tokenizer import Tokenizer

PRIORITY_NUMBERS = {"interactive": 0, "standard": 1, "batch": 2}


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    prefix_hash: str | None  # see gateway/affinity.py; None if there is no full block to share


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What is to be generated, with everything checked. `num_choices` sequences for each prompt."""

    model: str
    prompts: Sequence[Prompt]
    num_choices: int
    sampling: SamplingParams
    stop: Sequence[str]
    include_stop_in_output: bool
    skip_special_tokens: bool
    tenant: TenantId
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one update added to one choice."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: list[ScoredToken] = field(default_factory=list)  # of all tokens it counts; empty: not asked for


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True, eq=False)
class _Continuation:
    """One sequence: its tokens come in, its text goes out."""

    index: int
    prompt: Prompt
    detokenizer: IncrementalDetokenizer
    tokenizer: Tokenizer
    num_scored_characters: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None

    def apply(self, update: PendingUpdate) -> TextDelta:
        token_ids = update.new_token_ids
        self.num_cached_tokens = update.num_cached_tokens or self.num_cached_tokens
        # The token that ended the sequence is counted, but is not part of the answer.
        shown = token_ids[:-1] if update.stop_token_id is not None else token_ids
        text = self.detokenizer.append(shown)
        # The engine may have run on past a stop string; those tokens are nobody's answer.
        num_hidden = 0 if self.detokenizer.stopped else len(token_ids) - len(shown)
        num_before = self.num_output_tokens
        self.num_output_tokens = self.detokenizer.num_tokens + num_hidden
        logprobs = self._score(update.logprobs[: self.num_output_tokens - num_before])
        self.finish_reason = "stop" if self.detokenizer.stopped else update.finish_reason
        if self.finish_reason is not None:
            text += self.detokenizer.finish()
            if self.detokenizer.stopped:  # by a stop string that only the last, held-back text completed
                self.finish_reason = "stop"
        return TextDelta(self.index, text, self.finish_reason, logprobs)

    def _score(self, logprobs: Sequence[TokenLogprobs]) -> list[ScoredToken]:
        scored = []
        for one in logprobs:
            scored.append(score(one, self.tokenizer, self.num_scored_characters))
            self.num_scored_characters += len(scored[-1].text)
        return scored


class Generation:
    """Runs a plan on an engine. `close` ends whatever still runs and is called on every path."""

    def __init__(
        self,
        plan: GenerationPlan,
        pool: EnginePool,
        balancer: Balancer,
        span: trace.Span,
        first_token_timeout_s: float,
        on_placed: Callable[[Choice], None],
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._balancer = balancer
        self._span = span
        self._first_token_timeout_s = first_token_timeout_s
        self._on_placed = on_placed
        self._continuations: dict[RequestId, _Continuation] = {}
        self._mailbox: Mailbox | None = None
        self._link: EngineLink | None = None
        self._has_tokens = False
        self._has_moved = False
        self.choice: Choice | None = None

    def start(self) -> None:
        """Chooses an engine and submits every sequence. Raises ApiError 503 when there is none."""
        engines = self._pool.ready(self._plan.model)
        if not engines:
            raise unavailable(f"No engine is ready for the model {self._plan.model!r}.")
        num_sequences = self._plan.num_choices
        max_tokens = self._plan.sampling.max_tokens
        cost = sum(cost_of(len(p.token_ids), max_tokens) * num_sequences for p in self._plan.prompts)
        self.choice = self._balancer.choose(engines, self._plan.prompts[0].prefix_hash, cost)
        self._on_placed(self.choice)
        link = next(engine for engine in engines if engine.engine_id == self.choice.engine_id)
        self._link = link
        self._continuations = self._make_continuations(link.tokenizer)
        self._mailbox = Mailbox(dict.fromkeys(self._continuations, max_tokens))
        trace_context = inject(self._span)
        for request_id, continuation in self._continuations.items():
            link.submit(self._message(request_id, continuation, trace_context), self._mailbox)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Text as it comes, until every choice has ended. Raises ApiError."""
        unfinished = set(self._continuations)
        while unfinished:
            try:
                pending = await self._take()
            except EngineLostError as error:
                may_move = not (self._has_tokens or self._has_moved or error.by_a_step)
                if not (may_move and self._pool.ready(self._plan.model)):
                    raise upstream_error(f"The request was interrupted: {error}.") from error
                # Nothing was shown yet, and another engine is there.
                self._has_moved = True  # once: a request that kills engines must not kill them all
                self.start()
                unfinished = set(self._continuations)
                continue
            deltas = []
            for request_id, update in pending.items():
                if request_id not in unfinished:
                    continue  # tokens behind a stop string
                if update.finish_reason == "abort":  # not by us: we no longer listen to what we aborted
                    raise upstream_error("The engine ended the request before it was complete.")
                delta = self._continuations[request_id].apply(update)
                deltas.append(delta)
                if delta.finish_reason is not None:
                    unfinished.discard(request_id)
                    if update.finish_reason is None:  # a stop string: only we know
                        self._abort([request_id])
            if deltas:
                yield deltas

    def close(self) -> None:
        """Aborts what still runs; idempotent. Must stay synchronous: it runs while being cancelled."""
        self._abort(list(self._continuations))

    @property
    def usage(self) -> Usage:
        continuations = self._continuations.values()
        cached = {id(c.prompt): c.num_cached_tokens for c in continuations}
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._plan.prompts),
            completion_tokens=sum(c.num_output_tokens for c in continuations),
            cached_tokens=sum(cached.values()),
        )

    async def _take(self) -> dict[RequestId, PendingUpdate]:
        assert self._mailbox is not None, "start comes first"
        try:
            if self._has_tokens:
                pending = await self._mailbox.take()
            else:
                async with asyncio.timeout(self._first_token_timeout_s):
                    pending = await self._mailbox.take()
        except TimeoutError as error:
            raise timed_out("The engine did not produce a first token in time.") from error
        except EngineRejectedError as error:
            raise _from_reject(error.reject) from error
        except MailboxOverflowError as error:
            raise upstream_error(f"The request failed: {error}.") from error
        self._has_tokens = True
        return pending

    def _make_continuations(self, tokenizer: Tokenizer) -> dict[RequestId, _Continuation]:
        plan = self._plan
        continuations: dict[RequestId, _Continuation] = {}
        for prompt in plan.prompts:
            for _ in range(plan.num_choices):
                detokenizer = IncrementalDetokenizer(
                    tokenizer,
                    prompt.token_ids,
                    plan.stop,
                    include_stop_in_output=plan.include_stop_in_output,
                    skip_special_tokens=plan.skip_special_tokens,
                    min_tokens=plan.sampling.min_tokens,
                )
                continuation = _Continuation(len(continuations), prompt, detokenizer, tokenizer)
                continuations[fresh_request_id()] = continuation
        return continuations

    def _message(
        self, request_id: RequestId, continuation: _Continuation, trace_context: dict[str, str]
    ) -> Submit:
        sampling = self._plan.sampling
        if continuation.index:  # choices of one request must differ, and be the same when replayed
            seed = (sampling.seed + continuation.index) % (MAX_SEED + 1)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        return Submit(
            request_id=request_id,
            prompt_token_ids=continuation.prompt.token_ids,
            sampling=sampling,
            tenant=self._plan.tenant,
            priority=self._plan.priority,
            cache_salt=self._plan.cache_salt,
            trace_context=trace_context,
        )

    def _abort(self, request_ids: list[RequestId]) -> None:
        if self._link is not None:
            self._link.abort(request_ids)


def _from_reject(reject: Reject) -> ApiError:
    match reject.code:
        case "queue_full":
            return overloaded(reject.message)
        case "invalid_request":
            return invalid_request(reject.message, reject.param)
        case "context_length_exceeded":
            return context_length_exceeded(reject.message, reject.param or "prompt")
        case "draining":
            return unavailable(reject.message)
        case "internal_error":
            return upstream_error(reject.message)
