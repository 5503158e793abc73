"""Log-probabilities with the text that belongs to them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import TokenLogprobs
from shared.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of an answer, with its own text: a special one's name, U+FFFD for a part of a character."""

    text: str
    logprob: float
    top: list[tuple[str, float]]  # most likely tokens, descending; as many as were asked for
    offset: int  # characters of the tokens before it


def score(logprobs: TokenLogprobs, tokenizer: Tokenizer, offset: int) -> ScoredToken:
    return ScoredToken(
        tokenizer.text_of_token(logprobs.token_id),
        logprobs.logprob,
        [(tokenizer.text_of_token(token_id), logprob) for token_id, logprob in logprobs.top],
        offset,
    )
