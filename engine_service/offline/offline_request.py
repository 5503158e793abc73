"""One request on its way through the engine: its `n` sequences, and the output that they add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine_service.offline.prompts import EncodedPrompt
from engine_service.offline.request_output import CompletionOutput, Logprob, RequestOutput
from engine_service.offline.sampling_params import BeamSearchParams, SamplingParams
from shared.detokenizer import IncrementalDetokenizer
from shared.identifiers import RequestId, TenantId, fresh_request_id
from shared.messages import FinishReason, ModelCard, SequenceUpdate, Submit, TokenLogprobs
from shared.sampling import MAX_SEED
from shared.tokenizer import Tokenizer

TENANT = TenantId("offline")


@dataclass(slots=True, eq=False)
class Continuation:
    """One sequence: its tokens come in, its text goes out."""

    index: int
    submit: Submit
    tokenizer: Tokenizer
    detokenizer: IncrementalDetokenizer
    stop: list[str]
    keeps_stop: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of token_ids; empty: not asked for
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_unwatched: int = 0  # characters of `text` that came too early for a stop string

    def apply(self, update: SequenceUpdate, eos_token_ids: frozenset[int]) -> None:
        self.num_cached_tokens = update.num_cached_tokens or self.num_cached_tokens
        token_ids = update.new_token_ids
        hides_last = update.stop_token_id is not None and not self.keeps_stop
        shown = token_ids[:-1] if hides_last else token_ids
        self.text += self.detokenizer.append(shown)
        if self.detokenizer.num_tokens <= self.submit.sampling.min_tokens:
            self.num_unwatched = len(self.text)
        if update.finish_reason is not None:
            self.text += self.detokenizer.finish()
        self.token_ids += token_ids
        self.logprobs += update.logprobs
        if self.detokenizer.stopped:
            self._stop_at_string()
            return
        self.finish_reason = update.finish_reason
        if update.stop_token_id is not None and update.stop_token_id not in eos_token_ids:
            self.stop_reason = update.stop_token_id

    def output(self) -> CompletionOutput:
        asks_for_logprobs = self.submit.sampling.logprobs is not None
        return CompletionOutput(
            self.index,
            self.text,
            list(self.token_ids),
            sum(one.logprob for one in self.logprobs) if asks_for_logprobs else None,
            [named(one, self.tokenizer) for one in self.logprobs] if asks_for_logprobs else None,
            self.finish_reason,
            self.stop_reason,
        )

    def _stop_at_string(self) -> None:
        """The detokenizer has cut behind a stop string: of those that end there, the longest."""
        # Tokens behind the one that completed it are nobody's answer.
        num_tokens = self.detokenizer.num_tokens
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        watched = self.text[self.num_unwatched :]
        stop = max((stop for stop in self.stop if watched.endswith(stop)), key=len)
        if not self.keeps_stop:
            self.text = self.text.removesuffix(stop)
        self.finish_reason, self.stop_reason = "stop", stop


def named(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """In front the token that came, whether or not it is among the best."""
    text_of = tokenizer.text_of_token
    by_id = {position.token_id: Logprob(position.logprob, position.rank, text_of(position.token_id))}
    for rank, (token_id, logprob) in enumerate(position.top, start=1):
        by_id.setdefault(token_id, Logprob(logprob, rank, text_of(token_id)))
    return by_id


class OfflineRequest:
    """Belongs to the engine's thread once it is submitted; `on_change` is called there after each change."""

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams | BeamSearchParams,
        card: ModelCard,
        tokenizer: Tokenizer,
        *,
        seed: int,
        on_change: Callable[[OfflineRequest], None],
    ) -> None:
        """`seed` is that of the first sequence. Raises ValueError for what the model cannot run."""
        self.request_id = request_id
        self.prompt = prompt
        self.error: str | None = None
        self.failure: BaseException | None = None  # of the engine, which has ended with it
        self.on_change = on_change
        self._eos_token_ids = frozenset(card.eos_token_ids)
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        room = _room_behind(prompt.token_ids, card)
        self.continuations: dict[RequestId, Continuation] = {}
        leader: RequestId | None = None  # the first sequence, whose prompt the others share
        for index in range(params.n):
            # As the gateway does it: choices of one request differ, and are the same when replayed.
            sampling = params.to_engine(
                tokenizer, seed=(seed + index) % (MAX_SEED + 1), room=room, vocab_size=card.vocab_size
            )
            if leader is not None:  # which tells of the prompt for all
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
            submit = Submit(fresh_request_id(), prompt.token_ids, sampling, TENANT, shares_prompt_with=leader)
            leader = leader or submit.request_id
            detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt.token_ids,
                params.stop_strings,
                include_stop_in_output=True,  # so that it can be told which one it was
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=sampling.min_tokens,
            )
            self.continuations[submit.request_id] = Continuation(
                index,
                submit,
                tokenizer,
                detokenizer,
                params.stop_strings,
                params.include_stop_str_in_output,
            )

    @property
    def is_finished(self) -> bool:
        return all(each.finish_reason is not None for each in self.continuations.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.continuations.values())

    def apply(self, update: SequenceUpdate) -> bool:
        """Whether the engine still runs the sequence and need not: a stop string, which only we know."""
        continuation = self.continuations[update.request_id]
        asks = continuation.submit.sampling.prompt_logprobs is not None and self._prompt_logprobs is None
        if asks and update.new_token_ids:
            told = [named(one, self._tokenizer) for one in update.prompt_logprobs]
            self._prompt_logprobs = [None, *told]
        continuation.apply(update, self._eos_token_ids)
        return continuation.finish_reason is not None and update.finish_reason is None

    def give_up(self, error: str | None = None) -> list[RequestId]:
        """Ends what has not ended. Returns the sequences that the engine may still run."""
        unfinished = [key for key, each in self.continuations.items() if each.finish_reason is None]
        for key in unfinished:
            self.continuations[key].finish_reason = "abort"
        if unfinished and self.error is None:
            self.error = error
        return unfinished

    def output(self) -> RequestOutput:
        continuations = self.continuations.values()
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            [each.output() for each in continuations],
            finished=self.is_finished,
            # The first sequence is the one that finds only what other requests have left.
            num_cached_tokens=next(iter(continuations)).num_cached_tokens,
            error=self.error,
            prompt_logprobs=self._prompt_logprobs,
        )


def _room_behind(token_ids: list[int], card: ModelCard) -> int:
    """Tokens that may follow a prompt, at least one. Raises ValueError."""
    if not token_ids:
        raise ValueError("the prompt has no tokens")
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise ValueError(
                f"token id {token_id} is not below {card.vocab_size}, the size of the vocabulary"
            )
    # The last token of a sequence needs no place in the cache.
    capacity = min(card.max_model_len, card.num_blocks * card.block_size + 1)
    if len(token_ids) >= capacity:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; with at least one token of output there is room for "
            f"{capacity - 1} (max_model_len {card.max_model_len}, {card.num_blocks} KV blocks of "
            f"{card.block_size} tokens)"
        )
    return capacity - len(token_ids)
