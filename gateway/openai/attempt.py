"""A request as one variant of its route is to answer it, with everything checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from gateway.generation import GenerationPlan
from gateway.openai.admission import Admitted
from gateway.openai.api import BodyT, WishT
from gateway.openai.turn import TurnPlan


@dataclass(frozen=True, slots=True)
class Attempt(Generic[BodyT, WishT]):
    admitted: Admitted[BodyT]
    asked: WishT  # by the client
    wish: WishT  # with what the variant adds
    turn: TurnPlan
    plan: GenerationPlan

    def reads_like(self, admitted: Admitted[BodyT]) -> bool:
        """Whether the request has the same tokens for another variant."""
        ours, theirs = self.admitted, admitted
        return (
            ours.engine.tokenizer is theirs.engine.tokenizer
            and ours.variant.system_prompt == theirs.variant.system_prompt
            and ours.engine.card.block_size == theirs.engine.card.block_size
            and ours.engine.card.vocab_size == theirs.engine.card.vocab_size
        )
