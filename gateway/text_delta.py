"""What one update of the engine added to one choice of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.scored_token import RankedToken, ScoredToken
from shared.messages import FinishReason


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What was added to one call of a tool. The first delta of a call has its id and its name."""

    index: int  # among the calls of this choice
    arguments: str = ""  # more of their JSON text
    call_id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class TextDelta:
    """`text` is what the model said, until a TurnReader has told its parts from one another.

    Nobody changes one. It is not frozen, as there is one for every token: that would take thrice the time.
    """

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: list[ScoredToken] = field(default_factory=list)  # of all tokens it counts; empty: not asked for
    num_tokens: int = 0  # generated ones that it counts
    logprob_sum: float = 0.0  # of these, if the engine was asked for them
    # of the first update, if asked for: of each prompt token but the first
    prompt_logprobs: list[list[RankedToken]] | None = None
    token_ids: list[int] = field(default_factory=list)  # those that it counts
    prompt_token_ids: list[int] | None = None  # of the first update, if asked for
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_reason: str | int | None = None  # with the last delta: what the client gave, if that ended it

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.logprobs)
