"""How one turn of a model is held to a form, and how its text is told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.text_delta import TextDelta
from shared.config import ModelConfig
from shared.messages import ModelCard
from shared.sampling import StructuredOutput
from shared.tokenizer import Tokenizer


class TurnReader(Protocol):
    """Of one choice. Tells answer, reasoning and calls of tools from one another while they arrive."""

    def read(self, delta: TextDelta) -> Sequence[TextDelta]:
        """The same with each part in its place: several, where the order of text and calls would be lost in
        one. What may be the begin of a marker is held back; the delta with a finish reason brings what is
        left of it."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """The model that is to answer, as far as a gateway knows it."""

    tokenizer: Tokenizer
    card: ModelCard
    config: ModelConfig | None  # None: an engine registered itself for a model that nobody configured


@dataclass(frozen=True, slots=True)
class TurnPlan:
    form: StructuredOutput | None = None
    form_param: str | None = None  # the field that asks for the form; None: that of structured output
    skip_special_tokens: bool = True
    kept_special_tokens: frozenset[int] = frozenset()  # that are text all the same: a reader goes by them
    make_reader: Callable[[], TurnReader] | None = None  # None: all of the text is the answer
