"""What is asked of a row of logits: what changes them, how a token is chosen, what is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LogitAdjustment(NamedTuple):
    """Changes of a row of logits, in the order in which they are made. All ids are in the vocabulary."""

    logit_bias: Mapping[int, float] = {}
    """Added."""
    token_ids: Sequence[int] = ()
    """The sequence so far: its first `num_prompt_tokens` are the prompt."""
    num_prompt_tokens: int = 0
    repetition_penalty: float = 1.0
    """What is above 0 is divided by it and the rest multiplied, once for each token of the sequence."""
    presence_penalty: float = 0.0
    """Subtracted, once for each token of the output."""
    frequency_penalty: float = 0.0
    """The same, for each time that the token is there. Both are added up in float64."""
    allowed: Sequence[int] | None = None
    """All others become -inf, and none of these stays it or is NaN: such become the lowest number, halved."""
    barred: Sequence[int] = ()
    """These become -inf."""
    mask: NDArray[np.uint8] | None = None
    """As `allowed`: bit `t % 8` of byte `t // 8` is token t's. Tokens behind its end are not allowed."""

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Draw(NamedTuple):
    """A random choice. What each filter means: engine_service/token_filter.py."""

    number: float  # in [0, 1): the share of all tokens, in the order of ids, at which the choice is
    temperature: float = 1.0  # above 0
    min_p: float = 0.0
    top_k: int = 0  # no limit below 1
    top_p: float = 1.0


class RowLogprobs(NamedTuple):
    """Natural logarithms of probabilities; NaN in a row where the model has overflowed."""

    chosen: float
    rank: int  # from 1; equals share the better one, so that a greedy choice is always the first
    top_ids: list[int]
    top: list[float]  # descending, equals by their ids
