"""Which tokens may come next in a sequence whose output has a form."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine_service.sequence import Sequence
from engine_service.structured_output.grammar import PackedMask


def token_mask(sequence: Sequence, eos_token_ids: Iterable[int]) -> PackedMask | None:
    """The allowed tokens; at least one. None for a sequence without a form, or whose next token fails.

    The form has the last word about the end: `min_tokens` and `ignore_eos` keep a sequence from ending
    where something else may follow, and give way where nothing else may.
    """
    grammar = sequence.grammar
    if grammar is None or (mask := grammar.mask()) is None:
        return None
    sampling = sequence.sampling
    unwanted: set[int] = set()
    if sampling.ignore_eos:
        unwanted.update(eos_token_ids)
    if sequence.num_output_tokens < sampling.min_tokens:
        unwanted.update(eos_token_ids, sampling.stop_token_ids)
    if not unwanted:
        return mask
    others = mask.copy()
    for token_id in unwanted:
        others[token_id // 8] &= 0xFF ^ 1 << token_id % 8
    return others if others.any() else mask


def allowed_token_ids(mask: PackedMask) -> list[int]:
    """In ascending order."""
    token_ids: list[int] = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
    return token_ids
