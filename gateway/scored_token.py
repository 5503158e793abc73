"""Log-probabilities with the text that belongs to them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.detokenizer import MAX_HELD_TOKENS, REPLACEMENT
from shared.messages import TokenLogprobs
from shared.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of an answer, with its own text: a special one's name, U+FFFD for a part of a character."""

    text: str
    logprob: float | None  # None: of the first token of a prompt, which follows nothing
    top: list[tuple[str, float]]  # most likely tokens, descending; as many as were asked for
    offset: int  # where it begins in the text, in characters


@dataclass(frozen=True, slots=True)
class RankedToken:
    """One of the tokens that could have come at one place."""

    token_id: int
    text: str
    logprob: float
    rank: int  # from 1


def score(
    logprobs: TokenLogprobs, tokenizer: Tokenizer, offset: int, num_top: int | None = None
) -> ScoredToken:
    """`num_top`: how many of the most likely; None: all that are there."""
    return ScoredToken(
        tokenizer.text_of_token(logprobs.token_id),
        logprobs.logprob,
        [(tokenizer.text_of_token(token_id), logprob) for token_id, logprob in logprobs.top[:num_top]],
        offset,
    )


def rank(logprobs: TokenLogprobs, tokenizer: Tokenizer, num_top: int) -> list[RankedToken]:
    """The token that came, then the most likely, each once."""
    text_of = tokenizer.text_of_token
    token_id = logprobs.token_id
    return [
        RankedToken(token_id, text_of(token_id), logprobs.logprob, logprobs.rank),
        *(
            RankedToken(other_id, text_of(other_id), logprob, place)
            for place, (other_id, logprob) in enumerate(logprobs.top[:num_top], start=1)
            if other_id != token_id
        ),
    ]


class TextPosition:
    """Where the next token begins in its text. Tokens that share a character all begin where it does."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0, *, begins_text: bool = False) -> None:
        """`begins_text`: no token comes before the first one; some decoders strip its space then."""
        self._tokenizer = tokenizer
        self._begins_text = begins_text
        self._parts: list[int] = []  # of a character whose other parts are to come
        self.offset = offset

    def pass_over(self, token_id: int) -> None:
        text = self._tokenizer.text_of_token(token_id)
        if self._begins_text:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._begins_text = False
        if self._parts or REPLACEMENT in text:
            self._parts.append(token_id)
            text = self._tokenizer.decode(self._parts, skip_special_tokens=False)
            if text.endswith(REPLACEMENT) and len(self._parts) < MAX_HELD_TOKENS:
                return
            self._parts.clear()
        self.offset += len(text)
