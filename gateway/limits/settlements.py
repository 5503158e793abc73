"""Reservations that have ended and are still to be settled, while Redis takes its time or is away."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import NamedTuple

from gateway.limits.reservation import Reservation

logger = logging.getLogger(__name__)

MAX_WAITING = 20_000  # reservations beyond that are left to their leases


class Settlement(NamedTuple):
    """What a request really took."""

    reservation: Reservation
    input_tokens: int
    output_tokens: int
    is_unsure: bool  # a command that makes or renews the reservation may come after this one


class Settlements:
    def __init__(self) -> None:
        self._waiting: deque[Settlement] = deque()
        self._has_dropped = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, settlement: Settlement) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(settlement)
        elif not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                "more than %d requests have ended while Redis is away: their reservations are left to expire",
                MAX_WAITING,
            )

    def take(self, at_most: int) -> list[Settlement]:
        num_taken = min(at_most, len(self._waiting))
        return [self._waiting.popleft() for _ in range(num_taken)]

    def put_back(self, settlements: list[Settlement]) -> None:
        """They could not be sent, or Redis did not say whether it has taken them; each counts once only."""
        room = MAX_WAITING - len(self._waiting)
        self._waiting.extendleft(reversed(list(itertools.islice(settlements, max(0, room)))))

    def were_sent(self) -> None:
        if not self._waiting:
            self._has_dropped = False
