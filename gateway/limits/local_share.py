"""Limits while Redis cannot be asked: each gateway keeps to its share, by its own memory and clock.

The shares of all gateways that lived when Redis was last heard of add up to the limit.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gateway.limits.dimensions import Dimension, Kind
from gateway.limits.reservation import Reservation
from shared.identifiers import TenantId

MINUTE_S = 60.0
DAY_S = 86_400.0
A_MOMENT_S = 1.0  # when a slot becomes free is not known
MAX_ACCOUNTS = 10_000  # more than that: those that have run off are forgotten

Account = tuple[TenantId, str]


class Refusal(NamedTuple):
    dimension: Dimension
    wait_s: float | None  # None: there will never be room


class LocalShare:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._marks: dict[Account, float] = {}  # theoretical arrival times, as in accounts.lua
        self._days: dict[Account, tuple[int, int]] = {}  # which day of UTC, and tokens used on it
        self._slots: Counter[Account] = Counter()

    def hold(self, reservation: Reservation) -> None:
        """It runs: also what Redis has let in fills a share. `leave` ends it."""
        if reservation.dimensions.has_slots:
            reservation.has_local_slots = True
            self._slots.update(self._slots_of(reservation))

    def leave(self, reservation: Reservation) -> None:
        """Idempotent."""
        if not reservation.has_local_slots:
            return
        reservation.has_local_slots = False
        for account in self._slots_of(reservation):
            self._slots[account] -= 1
            if self._slots[account] <= 0:
                del self._slots[account]

    def reserve(self, reservation: Reservation, num_gateways: int) -> Refusal | None:
        """Charges all limits that say `local_share`, or none if one of them refuses."""
        shared = [
            dimension
            for dimension in reservation.dimensions.all
            if dimension.on_redis_failure == "local_share"
        ]
        refusals, charged = [], []
        for dimension in shared:
            refusal = self._refusal(reservation, dimension, num_gateways)
            if refusal is None:
                charged.append(dimension)
            elif not dimension.is_shadow:
                refusals.append(refusal)
        if refusals:
            return max(refusals, key=lambda refusal: math.inf if refusal.wait_s is None else refusal.wait_s)
        for dimension in charged:
            self._charge(reservation, dimension, num_gateways)
        return None

    def _refusal(self, reservation: Reservation, dimension: Dimension, num_gateways: int) -> Refusal | None:
        account = (reservation.dimensions.tenant, dimension.field)
        # At least one: a share of nothing would lock a small tenant out.
        limit, burst = max(1, dimension.limit // num_gateways), max(1, dimension.burst // num_gateways)
        if dimension.kind is Kind.SLOTS:
            return Refusal(dimension, A_MOMENT_S) if self._slots[account] >= limit else None
        cost = dimension.cost(reservation.input_tokens, reservation.output_tokens)
        if cost == 0:
            return None
        if cost > dimension.burst:  # with Redis there would be no room either
            return Refusal(dimension, None)
        if dimension.kind is Kind.DAY:
            now = self._wall_clock()
            day, used = self._days.get(account, (0, 0))
            used = used if day == int(now // DAY_S) else 0
            # One that is larger than a share may have a day's share to itself.
            return Refusal(dimension, DAY_S - now % DAY_S) if used and used + cost > limit else None
        interval_s = MINUTE_S * num_gateways / dimension.limit
        ahead_s = max(self._marks.get(account, 0.0) - self._clock(), 0.0)
        wait_s = ahead_s + (min(cost, burst) - burst) * interval_s
        return Refusal(dimension, wait_s) if wait_s > interval_s / 100 else None

    def _charge(self, reservation: Reservation, dimension: Dimension, num_gateways: int) -> None:
        account = (reservation.dimensions.tenant, dimension.field)
        cost = dimension.cost(reservation.input_tokens, reservation.output_tokens)
        if dimension.kind is Kind.RATE:
            if len(self._marks) >= MAX_ACCOUNTS:
                now = self._clock()
                self._marks = {known: mark for known, mark in self._marks.items() if mark > now}
            interval_s = MINUTE_S * num_gateways / dimension.limit
            self._marks[account] = max(self._marks.get(account, 0.0), self._clock()) + cost * interval_s
        elif dimension.kind is Kind.DAY:
            today = int(self._wall_clock() // DAY_S)
            if len(self._days) >= MAX_ACCOUNTS:
                self._days = {known: one for known, one in self._days.items() if one[0] == today}
            day, used = self._days.get(account, (0, 0))
            self._days[account] = (today, (used if day == today else 0) + cost)

    def _slots_of(self, reservation: Reservation) -> list[Account]:
        dimensions = reservation.dimensions
        return [(dimensions.tenant, each.field) for each in dimensions.all if each.kind is Kind.SLOTS]
