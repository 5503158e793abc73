"""How many replicas carry a load: arithmetic alone, without files, engines or clocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import ConfigError

ROUNDING = 1e-9  # 140 / (17.5 · 0.8) is 10, not 10.000000000000002
MAX_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class Headroom:
    """The share of the capacity that is left free. What was asked for, or what growth needs, if that is more.

    While a new replica starts, the load grows on: by growth × start time, as a share of the peak.
    """

    asked: float
    growth_per_s: float = 0.0  # requests/s more, each second
    replica_start_s: float = 0.0
    peak_rate: float = 1.0

    @property
    def needed(self) -> float:
        return self.growth_per_s * self.replica_start_s / self.peak_rate

    @property
    def used(self) -> float:
        return max(self.asked, self.needed)


def check_headroom(headroom: Headroom) -> None:
    """Raises ConfigError for headroom that leaves nothing to use."""
    if not 0 <= headroom.asked < 1:
        raise ConfigError(f"must be at least 0 and below 1, got {headroom.asked:g}", "--headroom")
    if not headroom.needed < 1:
        raise ConfigError(
            f"the load grows by {headroom.growth_per_s * headroom.replica_start_s:.4g} requests/s while "
            "one replica "
            f"starts, which is more than the whole peak of {headroom.peak_rate:g}: start them sooner, "
            "or faster",
            "--growth-per-s",
        )


@dataclass(frozen=True, slots=True)
class Pooling:
    """What replicas do for each other. `of_two`: capacity of two, over twice that of one.

    Below 1 they stand in each other's way: then by the universal scalability law, with contention alone,
    R replicas do R / (1 + s (R - 1)) of one, s = 1 / of_two - 1. Above 1 they share a queue that one alone
    has for itself; that gain is taken as measured for two, and not stretched for more.
    """

    of_two: float = 1.0

    def efficiency(self, num_replicas: int) -> float:
        if num_replicas < 2:
            return 1.0
        if self.of_two >= 1:
            return self.of_two
        return 1 / (1 + (1 / self.of_two - 1) * (num_replicas - 1))

    def capacity(self, of_one: float, num_replicas: int) -> float:
        """Of all of them together."""
        return of_one * num_replicas * self.efficiency(num_replicas)


def replicas_for(
    load: float, capacity_of_one: float, headroom: float = 0.0, pooling: Pooling | None = None
) -> int | None:
    """The fewest that carry the load with that headroom, at least one. None: not even `MAX_REPLICAS` do."""
    pooling = pooling or Pooling()
    usable = capacity_of_one * (1 - headroom)
    if usable <= 0:
        return None
    # The efficiency falls as replicas are added, so that one division gives only a first guess.
    least = load / (usable * max(1.0, pooling.of_two)) - ROUNDING
    if not least <= MAX_REPLICAS:
        return None
    number = max(1, math.ceil(least))
    if pooling.of_two < 1 and load >= usable / (1 / pooling.of_two - 1):
        return None  # the limit of R / (1 + s (R - 1)) is 1 / s
    while pooling.capacity(usable, number) < load * (1 - ROUNDING):
        number += 1
        if number > MAX_REPLICAS:
            return None
    return number


def survives_loss(
    load: float, capacity_of_one: float, num_replicas: int, pooling: Pooling | None = None
) -> bool:
    """Whether one replica fewer still keeps the promise, though with no headroom."""
    if num_replicas < 2:
        return False
    left = (pooling or Pooling()).capacity(capacity_of_one, num_replicas - 1)
    return load <= left * (1 + ROUNDING)


def default_spare(num_replicas: int) -> int:
    return 1 if num_replicas > 1 else 0
