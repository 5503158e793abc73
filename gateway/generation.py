"""One request from its reservation to its settlement: the owner of everything it holds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from opentelemetry import trace

from gateway import long_work
from gateway.balancer import Choice
from gateway.engine_link import EngineLostError, EngineRejectedError, cost_of
from gateway.errors import from_reject, interrupted, timed_out, upstream_error
from gateway.mailbox import Mailbox, MailboxOverflowError, PendingUpdate
from gateway.placement import Placement
from gateway.prompt_answer import Echo, PromptAnswer
from gateway.scored_token import ScoredToken, TextPosition, score
from gateway.text_delta import TextDelta
from shared.detokenizer import IncrementalDetokenizer
from shared.identifiers import RequestId, TenantId, fresh_request_id
from shared.messages import FinishReason, Reject, Submit, TokenLogprobs
from shared.sampling import MAX_SEED, SamplingParams
from shared.telemetry import inject
from shared.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    prefix_hash: str | None  # see gateway/affinity.py; None if there is no full block to share
    echo: Echo | None = None  # what its answers begin with, if they are to repeat it


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What is to be generated, with everything checked. `num_choices` for each prompt: each a sequence of
    its own, or all of them the best beams of one search."""

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
    tells_logprobs: bool = False  # what `sampling` asks of the engine may be for our own use
    num_prompt_logprobs: int | None = None  # alternatives to tell beside each prompt token; None: no scores
    form_param: str = "response_format"  # the field that asked for the form of the output
    tells_prompt_token_ids: bool = False
    kept_special_tokens: frozenset[int] = frozenset()  # even where the others are skipped
    keeps_output: bool = True  # False: the answer ends with the prompt, whatever the engine generates


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
    prompt_answer: PromptAnswer  # shared by all choices of this prompt
    leader: RequestId | None  # the first choice of this prompt, whose work the others share
    detokenizer: IncrementalDetokenizer
    tokenizer: Tokenizer
    position: TextPosition
    tells_logprobs: bool
    keeps_output: bool
    tells_prompt_token_ids: bool
    clients_stop_tokens: frozenset[int]  # those that the model itself does not end with
    has_begun: bool = False
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None

    def apply(self, update: PendingUpdate) -> TextDelta:
        self.num_cached_tokens = update.num_cached_tokens or self.num_cached_tokens
        self.prompt_answer.take(update.prompt_logprobs)
        if self.keeps_output:
            delta = self._continue(update)
        else:
            self.finish_reason = "length"
            delta = TextDelta(self.index, "", self.finish_reason)
        if self.has_begun:
            return delta
        self.has_begun = True
        if not self.tells_prompt_token_ids and self.prompt_answer.is_empty:
            return delta
        return replace(
            delta,
            text=self.prompt_answer.text + delta.text,
            logprobs=self.prompt_answer.echoed + delta.logprobs,
            prompt_logprobs=self.prompt_answer.ranked,
            prompt_token_ids=self.prompt.token_ids if self.tells_prompt_token_ids else None,
        )

    def _continue(self, update: PendingUpdate) -> TextDelta:
        token_ids = update.new_token_ids
        # The token that ended the sequence is counted, but is not part of the answer.
        shown = token_ids[:-1] if update.stop_token_id is not None else token_ids
        text = self.detokenizer.append(shown)
        # The engine may have run on past a stop string; those tokens are nobody's answer.
        num_hidden = 0 if self.detokenizer.stopped else len(token_ids) - len(shown)
        num_before = self.num_output_tokens
        self.num_output_tokens = self.detokenizer.num_tokens + num_hidden
        num_tokens = self.num_output_tokens - num_before
        logprobs = update.logprobs[:num_tokens]
        self.finish_reason = "stop" if self.detokenizer.stopped else update.finish_reason
        if self.finish_reason is not None:
            text += self.detokenizer.finish()
            if self.detokenizer.stopped:  # by a stop string that only the last, held-back text completed
                self.finish_reason = "stop"
        return TextDelta(
            self.index,
            text,
            self.finish_reason,
            self._score(logprobs) if self.tells_logprobs else [],
            num_tokens,
            sum(one.logprob for one in logprobs),
            token_ids=token_ids[:num_tokens],
            stop_reason=self._stop_reason(update.stop_token_id),
        )

    def _stop_reason(self, stop_token_id: int | None) -> str | int | None:
        if self.detokenizer.stopped:
            return self.detokenizer.stop_string
        return stop_token_id if stop_token_id in self.clients_stop_tokens else None

    def _score(self, logprobs: Sequence[TokenLogprobs]) -> list[ScoredToken]:
        scored = []
        for one in logprobs:
            scored.append(score(one, self.tokenizer, self.position.offset))
            self.position.pass_over(one.token_id)
        return scored


class Generation:
    """Runs a plan on an engine. `close` ends whatever still runs and is called on every path."""

    def __init__(
        self,
        plan: GenerationPlan,
        placement: Placement,
        span: trace.Span,
        first_token_timeout_s: float,
    ) -> None:
        self._plan = plan
        self._placement = placement
        self._span = span
        self._first_token_timeout_s = first_token_timeout_s
        self._continuations: dict[RequestId, list[_Continuation]] = {}  # one, or those of a beam search
        self._mailbox: Mailbox | None = None
        self._has_tokens = False

    @property
    def choice(self) -> Choice | None:
        return self._placement.choice

    @property
    def first_update_at(self) -> float:
        """When the engine was first heard of it, as of time.monotonic."""
        assert self._mailbox is not None, "start comes first"
        assert self._mailbox.first_put_at is not None, "only what has come can be told"
        return self._mailbox.first_put_at

    def start(self) -> None:
        """Chooses an engine and submits every sequence. Raises ApiError 503 when there is none."""
        sampling = self._plan.sampling
        num_sequences = self._plan.num_choices if sampling.beam_search is None else 1
        cost = sum(cost_of(len(p.token_ids), sampling) * num_sequences for p in self._plan.prompts)
        link = self._placement.choose(self._plan.prompts[0].prefix_hash, cost)
        # As in vLLM, a token that ends the model's turns anyway is not told, whoever asked for it.
        own_stop_tokens = () if sampling.ignore_eos else link.card.eos_token_ids
        clients_stop_tokens = frozenset(sampling.stop_token_ids).difference(own_stop_tokens)
        self._continuations = self._make_continuations(link.tokenizer, clients_stop_tokens)
        self._mailbox = Mailbox(dict.fromkeys(self._continuations, sampling.max_tokens))
        trace_context = inject(self._span)
        for request_id, continuations in self._continuations.items():
            link.submit(self._message(request_id, continuations[0], trace_context), self._mailbox)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Text as it comes, until every choice has ended. Raises ApiError."""
        unfinished = set(self._continuations)
        while unfinished:
            try:
                pending = await self._take()
            except EngineLostError as error:
                if self._has_tokens or not self._placement.may_move(error):
                    raise interrupted(error, by_a_step=error.by_a_step) from error
                self.start()
                unfinished = set(self._continuations)
                continue
            deltas = []
            for request_id, update in pending.items():
                if request_id not in unfinished:
                    continue  # tokens behind a stop string
                if update.finish_reason == "abort":  # not by us: we no longer listen to what we aborted
                    raise upstream_error("The engine ended the request before it was complete.")
                continuations = self._continuations[request_id]
                if update.beams or update.prompt_logprobs:
                    num_tokens = sum(len(beam.token_ids) for beam in update.beams)
                    its_deltas = await long_work.do(
                        functools.partial(self._apply, continuations, update),
                        is_long=num_tokens + len(update.prompt_logprobs) > long_work.MANY_SCORED_TOKENS,
                    )
                else:
                    its_deltas = self._apply(continuations, update)
                deltas += its_deltas
                if its_deltas and its_deltas[-1].finish_reason is not None:
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
        continuations = [each for group in self._continuations.values() for each in group]
        # Of the first choice of each prompt: the others find what that one has computed.
        cached = {id(c.prompt): c.num_cached_tokens for c in reversed(continuations)}
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._plan.prompts),
            completion_tokens=sum(c.num_output_tokens for c in continuations),
            cached_tokens=sum(cached.values()),
        )

    def _in_words_of_the_client(self, reject: Reject) -> Reject:
        """The engine knows one name for the form of the output, clients have two fields for it."""
        if reject.param != "response_format":
            return reject
        return msgspec.structs.replace(reject, param=self._plan.form_param)

    def _apply(self, continuations: list[_Continuation], update: PendingUpdate) -> list[TextDelta]:
        if self._plan.sampling.beam_search is None:
            return [continuation.apply(update) for continuation in continuations]
        for continuation in continuations:
            continuation.num_cached_tokens = update.num_cached_tokens or continuation.num_cached_tokens
        if update.finish_reason is not None and not update.beams:
            raise upstream_error("The engine ended a beam search and told no beams.")
        # Of a small vocabulary there may be fewer beams than were asked for.
        return [
            continuation.apply(PendingUpdate.of_beam(beam))
            for continuation, beam in zip(continuations, update.beams, strict=False)
        ]

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
            raise from_reject(self._in_words_of_the_client(error.reject)) from error
        except MailboxOverflowError as error:
            raise upstream_error(f"The request failed: {error}.") from error
        self._has_tokens = True
        return pending

    def _make_continuations(
        self, tokenizer: Tokenizer, clients_stop_tokens: frozenset[int]
    ) -> dict[RequestId, list[_Continuation]]:
        plan = self._plan
        continuations: dict[RequestId, list[_Continuation]] = {}
        index = 0
        for prompt in plan.prompts:
            leader: RequestId | None = None
            prompt_answer = PromptAnswer(
                prompt.token_ids,
                prompt.echo,
                tokenizer,
                num_logprobs=plan.sampling.logprobs if plan.tells_logprobs else None,
                num_prompt_logprobs=plan.num_prompt_logprobs,
            )
            for _ in range(plan.num_choices):
                detokenizer = IncrementalDetokenizer(
                    tokenizer,
                    prompt.token_ids,
                    plan.stop,
                    include_stop_in_output=plan.include_stop_in_output,
                    skip_special_tokens=plan.skip_special_tokens,
                    kept_special_tokens=plan.kept_special_tokens,
                    min_tokens=plan.sampling.min_tokens,
                )
                continuation = _Continuation(
                    index,
                    prompt,
                    prompt_answer,
                    leader,
                    detokenizer,
                    tokenizer,
                    TextPosition(tokenizer, len(prompt_answer.text)),
                    plan.tells_logprobs,
                    plan.keeps_output,
                    plan.tells_prompt_token_ids,
                    clients_stop_tokens,
                )
                index += 1
                if leader is not None and plan.sampling.beam_search is not None:
                    continuations[leader].append(continuation)
                    continue
                request_id = fresh_request_id()
                continuations[request_id] = [continuation]
                leader = leader or request_id
        return continuations

    def _message(
        self, request_id: RequestId, continuation: _Continuation, trace_context: dict[str, str]
    ) -> Submit:
        sampling = self._plan.sampling
        if continuation.index:  # choices of one request must differ, and be the same when replayed
            seed = (sampling.seed + continuation.index) % (MAX_SEED + 1)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        if continuation.leader is not None:  # which tells of the prompt for all
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            request_id=request_id,
            prompt_token_ids=continuation.prompt.token_ids,
            sampling=sampling,
            tenant=self._plan.tenant,
            priority=self._plan.priority,
            cache_salt=self._plan.cache_salt,
            trace_context=trace_context,
            shares_prompt_with=continuation.leader,
        )

    def _abort(self, request_ids: list[RequestId]) -> None:
        if self._placement.link is not None:
            self._placement.link.abort(request_ids)
