"""Sampling parameters as a user writes them; names, defaults and meanings are vLLM's."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from engine_service.offline.user_params import UserParams
from shared import sampling
from shared.errors import InvalidRequest
from shared.tokenizer import Tokenizer

MAX_CHOICES = 1024
_INT32_MAX = 2**31 - 1
_NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class StructuredOutputsParams(UserParams):
    """The form that an output must have: exactly one of the fields. See docs/STRUCTURED_OUTPUT.md."""

    model_config = ConfigDict(frozen=True)

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(form is not None for form in given) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object is needed")
        return self

    def to_engine(self) -> sampling.StructuredOutput:
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return sampling.StructuredOutput("json_schema", text, is_strict=True)
        if self.regex is not None:
            return sampling.StructuredOutput("regex", self.regex)
        if self.choice is not None:
            return sampling.StructuredOutput("choice", json.dumps(self.choice))
        if self.grammar is not None:
            return sampling.StructuredOutput("grammar", self.grammar)
        return sampling.StructuredOutput("json_object")


class SamplingParams(UserParams):
    """How one prompt is continued.

    Fields that are typed with one value only are vLLM's for what is not there yet; the value means "off".
    """

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None or -1: one is drawn, see LLM's `seed`
    stop: _NonEmpty | Sequence[_NonEmpty] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = Field(16, ge=1)  # None, or more than there is room: as the context allows
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[_NonEmpty] | None = None
    allowed_token_ids: Annotated[Sequence[int], Field(min_length=1)] | None = None
    logprobs: int | None = None  # so many most likely tokens beside each chosen one
    prompt_logprobs: int | None = None  # the same beside each token of the prompt
    structured_outputs: StructuredOutputsParams | None = None
    # not served yet
    detokenize: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    truncate_prompt_tokens: None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        self.to_engine(None, seed=0, room=_INT32_MAX, vocab_size=_INT32_MAX)
        return self

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def first_seed(self, drawn_from: random.Random) -> int:
        """That of the first of `n` choices."""
        if self.seed is None or self.seed == -1:
            return drawn_from.getrandbits(63)
        return self.seed & sampling.MAX_SEED

    def to_engine(
        self, tokenizer: Tokenizer | None, *, seed: int, room: int, vocab_size: int
    ) -> sampling.SamplingParams:
        """For one sequence of a model that can take `room` more tokens; without `bad_words` if there is
        no tokenizer for them. Raises ValueError.
        """
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        # What was asked for is checked as it was asked for; only then is it cut to the room.
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, got {self.min_tokens} of {self.max_tokens}"
            )
        params = sampling.SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias or {}),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=min(self.min_tokens, max_tokens),
            ignore_eos=self.ignore_eos,
            structured_output=self.structured_outputs.to_engine() if self.structured_outputs else None,
            logprobs=self.logprobs,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tokenizer.bad_word_tokens(self.bad_words or ()) if tokenizer is not None else (),
            prompt_logprobs=self.prompt_logprobs,
        )
        return _checked(params, vocab_size)


class BeamSearchParams(UserParams):
    """How one prompt is continued by the most probable texts. See docs/OFFLINE.md."""

    beam_width: int = Field(ge=1, le=sampling.MAX_BEAM_WIDTH)
    max_tokens: int = Field(ge=1)  # more than there is room: as the context allows
    ignore_eos: bool = False
    temperature: float = 0.0  # or 1: the model's own distribution counts
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # the end of a beam is in its text anyway, as in vLLM
    # not served yet
    structured_outputs: None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        self.to_engine(None, seed=0, room=_INT32_MAX, vocab_size=_INT32_MAX)
        return self

    # What a request wants to know of any parameters: a search is one sequence of the engine, without a text.
    n: ClassVar[int] = 1
    stop_strings: ClassVar[list[str]] = []
    skip_special_tokens: ClassVar[bool] = False

    def to_engine(
        self, tokenizer: Tokenizer | None, *, seed: int, room: int, vocab_size: int
    ) -> sampling.SamplingParams:
        """As SamplingParams.to_engine."""
        search = sampling.BeamSearch(self.beam_width, self.length_penalty)
        params = sampling.SamplingParams(
            max_tokens=min(self.max_tokens, room),
            seed=seed,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            beam_search=search,
        )
        return _checked(params, vocab_size)


def _checked(params: sampling.SamplingParams, vocab_size: int) -> sampling.SamplingParams:
    """Raises ValueError."""
    try:
        params.check(vocab_size)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return params
