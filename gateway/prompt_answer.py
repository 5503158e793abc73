"""What an answer tells of its prompt: the text, if it is to be repeated, and the scores of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gateway.errors import upstream_error
from gateway.scored_token import RankedToken, ScoredToken, TextPosition, rank, score
from shared.messages import TokenLogprobs
from shared.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with."""

    text: str
    num_added_tokens: int  # at the front of its tokens, which the text does not have


class PromptAnswer:
    """Of one prompt, for all its choices. The engine tells its scores once, with the first of these."""

    def __init__(
        self,
        token_ids: Sequence[int],
        echo: Echo | None,
        tokenizer: Tokenizer,
        *,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
    ) -> None:
        """Alternatives of each token: where the prompt is echoed, and where it stands by itself. None: no
        scores there."""
        self._token_ids = token_ids
        self._echo = echo
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs if echo is not None else None
        self._num_prompt_logprobs = num_prompt_logprobs
        self._scores: list[TokenLogprobs] = []

    def take(self, scores: list[TokenLogprobs]) -> None:
        """What the engine has told of the tokens but the first."""
        self._scores += scores

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be told of the prompt."""
        return self._echo is None and self._num_prompt_logprobs is None

    @property
    def text(self) -> str:
        return self._echo.text if self._echo is not None else ""

    @cached_property
    def echoed(self) -> list[ScoredToken]:
        """The tokens of `text`; empty if no scores are wanted there. Raises ApiError 502."""
        echo = self._echo
        if echo is None or self._num_logprobs is None:
            return []
        text_of = self._tokenizer.text_of_token
        tokens = [ScoredToken(text_of(self._token_ids[0]), None, [], 0)]
        position = TextPosition(self._tokenizer, begins_text=True)
        for index, scores in enumerate(self._checked_scores()):
            if index >= echo.num_added_tokens:
                position.pass_over(self._token_ids[index])
            tokens.append(score(scores, self._tokenizer, position.offset, self._num_logprobs))
        return tokens

    @cached_property
    def ranked(self) -> list[list[RankedToken]] | None:
        """Of each token but the first; None if they are not wanted. Raises ApiError 502."""
        if self._num_prompt_logprobs is None:
            return None
        return [rank(scores, self._tokenizer, self._num_prompt_logprobs) for scores in self._checked_scores()]

    def _checked_scores(self) -> list[TokenLogprobs]:
        if [one.token_id for one in self._scores] != self._token_ids[1:]:
            raise upstream_error(
                f"The engine told log-probabilities of {len(self._scores)} tokens of a prompt "
                f"of {len(self._token_ids)}."
            )
        return self._scores
