"""A beam search on its way through the engine, and what it has found; fields and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_service.offline.offline_request import OfflineRequest
from shared.messages import Beam, FinishReason, SequenceUpdate


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One of the most probable texts."""

    tokens: list[int]  # of the prompt, too, and the one that ended it
    cum_logprob: float  # of those behind the prompt
    text: str  # of `tokens`, with the names of special ones
    finish_reason: FinishReason
    stop_reason: int | None = None  # the stop token's id; None: end of sequence


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # best first


class BeamSearchRequest(OfflineRequest):
    """One sequence to the worker, whose tokens nobody hears of: its beams come with its end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._beams: list[Beam] = []

    @property
    def num_output_tokens(self) -> int:
        return sum(len(beam.token_ids) for beam in self._beams)

    def apply(self, update: SequenceUpdate) -> bool:
        self._beams += update.beams
        return super().apply(update)

    def found(self) -> BeamSearchOutput:
        return BeamSearchOutput([self._sequence(beam) for beam in self._beams])

    def _sequence(self, beam: Beam) -> BeamSearchSequence:
        tokens = [*self.prompt.token_ids, *beam.token_ids]
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        is_eos = beam.stop_token_id in self._eos_token_ids
        stop_reason = None if is_eos else beam.stop_token_id
        return BeamSearchSequence(tokens, beam.cumulative_logprob, text, beam.finish_reason, stop_reason)
