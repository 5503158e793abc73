"""A compiled grammar, and where one sequence stands in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_service.refusal import Refusal
from shared.sampling import StructuredOutput

PARAM = "response_format"

PackedMask = NDArray[np.uint8]
"""A set of tokens: bit `t % 8` of byte `t // 8` is that of token t. The bits behind the last token are 0."""


class GrammarState(Protocol):
    """Of one sequence. Advanced only by tokens that the sequence has taken in, in their order.

    So preemption leaves it alone: the tokens stay, and only their keys and values are computed again.
    """

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow. (Where more may follow, an end may be allowed as well.)"""

    def accept(self, token_id: int) -> None:
        """Raises Refusal if the token cannot stand here, or if the grammar has become too complex."""

    def mask(self) -> PackedMask | None:
        """The tokens that may follow, those that end a sequence among them; leaves the state as it is.

        None if the grammar has become too complex; the next `accept` says so.
        """


class Grammar(Protocol):
    """Immutable and shared between sequences."""

    def start(self, output_token_ids: Iterable[int] = ()) -> GrammarState:
        """The state after these tokens. Raises Refusal if they do not fit."""


class GrammarCompiler(Protocol):
    """Called by several threads at once."""

    def compile(self, form: StructuredOutput) -> Grammar:
        """Raises Refusal if the form is wrong, too large or too complex. May take seconds."""

    def close(self) -> None:
        """Ends what it has started. Nothing is compiled afterwards."""


def refused(message: str) -> Refusal:
    return Refusal("invalid_request", message, PARAM)
