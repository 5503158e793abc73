"""What a request is expected to take, and what it holds of its limits while it runs."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.limits.dimensions import Dimensions
from gateway.limits.headers import Standing
from shared.identifiers import RequestId


@dataclass(frozen=True, slots=True)
class Demand:
    """Of one request, before it runs."""

    input_tokens: int = 0  # of all its prompts
    num_choices: int = 0  # of all its prompts
    max_tokens: int = 0  # of one choice

    def reserved_output(self, at_most_of_a_choice: int) -> int:
        """Most answers are far shorter than they might be: a limit must not be full of what nobody uses."""
        return self.num_choices * min(self.max_tokens, at_most_of_a_choice)


NO_TOKENS = Demand()  # what is done in the gateway itself counts as a request


class InRedis(enum.Enum):
    """Whether Redis has a reservation."""

    NO = enum.auto()
    YES = enum.auto()
    UNSURE = enum.auto()  # it was told to make it, and has not answered in time


def _no_output() -> int:
    return 0


@dataclass(slots=True, eq=False)
class Reservation:
    """Owned by its request; `Limiter.settle` ends it, once."""

    request_id: RequestId
    dimensions: Dimensions
    input_tokens: int
    output_tokens: int  # reserved, which may be less than there will be
    in_redis: InRedis = InRedis.NO
    is_settled: bool = False
    is_renewing: bool = False  # a command that does is on its way
    has_local_slots: bool = False
    reported_output: int = 0  # that Redis has taken note of
    standings: dict[str, Standing] = field(default_factory=dict)  # of its limits; none if Redis was away
    output_so_far: Callable[[], int] = _no_output  # set by who generates

    @property
    def is_kept(self) -> bool:
        """Whether there is something to settle: slots, or tokens."""
        dimensions = self.dimensions
        return dimensions.has_slots or (
            dimensions.counts_tokens and (self.input_tokens > 0 or self.output_tokens > 0)
        )

    @property
    def charged(self) -> tuple[int, int]:
        """Tokens that its accounts have been charged with if Redis does not know the reservation any more."""
        return (self.input_tokens, self.reported_output) if self.in_redis is InRedis.YES else (0, 0)
