"""OpenAI's two forms of log-probabilities; None where none were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.scored_token import RankedToken, ScoredToken


def chat_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {
            **_chat_entry(token.text, token.logprob),
            "top_logprobs": [_chat_entry(text, logprob) for text, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """The older form. Offsets count from the begin of the text, also in a chunk of a stream."""
    if not tokens:
        return None
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[Sequence[RankedToken]]) -> list[dict[str, Any] | None]:
    """vLLM's: for each token of the prompt the ranked ones by their ids; the first follows nothing."""
    return [
        None,
        *(
            {
                str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text}
                for one in ranked
            }
            for ranked in tokens
        ),
    ]


def _chat_entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _top_by_text(token: ScoredToken) -> dict[str, float] | None:
    """The chosen token is there also when it is not among the most likely, so there may be one more."""
    if token.logprob is None:
        return None
    by_text: dict[str, float] = {}
    for text, logprob in [*token.top, (token.text, token.logprob)]:
        by_text.setdefault(text, logprob)  # of tokens with one text the likeliest counts
    return by_text
