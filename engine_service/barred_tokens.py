"""Which tokens a request rules out at a position: by a list of allowed ones, bad words, min_tokens."""

from __future__ import annotations

from collections.abc import Iterable

from engine_service.sequence import Sequence


def barred_tokens(sequence: Sequence, eos_token_ids: Iterable[int]) -> set[int]:
    """Tokens that must not come next, the list of allowed ones left aside."""
    params = sequence.sampling
    barred: set[int] = set()
    if sequence.num_output_tokens < params.min_tokens and sequence.grammar is None:  # see token_mask
        barred.update(eos_token_ids, params.stop_token_ids)
    for *beginning, last in params.bad_words:
        # Only the output counts, as in vLLM: a word may be begun by the prompt and ended by the model.
        if len(beginning) <= sequence.num_output_tokens and _ends_with(sequence.token_ids, beginning):
            barred.add(last)
    return barred


def left_of_allowed(sequence: Sequence, barred: set[int]) -> list[int] | None:
    """Those of the request's allowed tokens that may come next, at least one; None if all are allowed.

    Where everything that is allowed is barred as well, the list of allowed tokens has the last word.
    """
    allowed = sequence.sampling.allowed_token_ids
    if not allowed:
        return None
    return [token_id for token_id in allowed if token_id not in barred] or list(allowed)


def _ends_with(token_ids: list[int], ending: list[int]) -> bool:
    return not ending or token_ids[-len(ending) :] == ending
