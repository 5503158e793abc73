"""When a simulated engine stands still."""

from __future__ import annotations

import math

from loadtest.simulator.knobs import SimulatorKnobs


class Stalls:
    """Tells each stall once, at the time at which it begins. Times are those of the caller's clock."""

    def __init__(self, knobs: SimulatorKnobs) -> None:
        self.duration_s = knobs.stall_s
        self._after_requests = knobs.stall_after_requests
        self._first_after_s = knobs.stall_at_s or knobs.stall_every_s
        self._every_s = knobs.stall_every_s
        self._num_requests = 0
        self.next_s = math.inf  # when the next one begins, as far as that is known
        self.num_begun = 0

    def note_request(self, now_s: float) -> None:
        self._num_requests += 1
        if self._num_requests == self._after_requests:
            self.next_s = now_s
        if self._num_requests == 1 and self._first_after_s:
            self.next_s = now_s + self._first_after_s

    def begin(self) -> None:
        """The one at `next_s`."""
        self.num_begun += 1
        self.next_s = self.next_s + self._every_s if self._every_s else math.inf
