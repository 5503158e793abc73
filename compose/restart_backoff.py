"""How long to wait before a crashed service is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RestartBackoff:
    """Doubling pauses up to a cap; a service that ran well for a while starts over at the first pause."""

    first_s: float = 0.25
    cap_s: float = 30.0
    ran_well_after_s: float = 60.0
    num_crashes: int = 0  # in a row

    def after_crash(self, lifetime_s: float) -> float:
        """The pause, in seconds, after a life of `lifetime_s`."""
        if lifetime_s >= self.ran_well_after_s:
            self.num_crashes = 0
        self.num_crashes += 1
        return min(self.cap_s, self.first_s * 2.0 ** (self.num_crashes - 1))
