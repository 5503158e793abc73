"""What a request has become so far; fields and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position, of the model's own distribution: before temperature and penalties."""

    logprob: float
    rank: int | None  # from 1
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str
    token_ids: list[int]  # with the token that ended it, or up to the one that completed a stop string
    cumulative_logprob: float | None = None  # of `token_ids`; None: logprobs were not asked for
    logprobs: list[dict[int, Logprob]] | None = None  # for each of `token_ids`: its own and the best ones
    finish_reason: FinishReason | None = None  # None: not at its end
    stop_reason: int | str | None = None  # the stop token's id or the stop string; None: end of sequence


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None: it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None  # why the engine ended it; see failures.GenerationError
    # for each of `prompt_token_ids`: its own and the best ones; None for the first, which follows nothing
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None: not asked for, or not there yet


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput  # one: vLLM's name all the same
    prompt_token_ids: list[int]  # with the special tokens at its ends
    finished: bool = True
