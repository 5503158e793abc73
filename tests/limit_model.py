"""What the scripts of gateway/limits/ do, once more in Python: plainly, one request at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway.limits.dimensions import Dimension, Dimensions, Kind

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000


@dataclass
class Charge:
    dimension: Dimension
    mark: float
    refunded: float


@dataclass
class Kept:
    input_tokens: int
    output_tokens: int
    charges: list[Charge]
    reported: int = 0
    is_tombstone: bool = False


@dataclass
class Result:
    """Of reserving. `wait_us`: -1: never."""

    is_admitted: bool
    refusing: Dimension | None = None
    wait_us: int = 0
    shadows: list[Dimension] = field(default_factory=list)


class LimitModel:
    def __init__(self, lease_us: int) -> None:
        self.now = 0
        self.rates: dict[str, tuple[float, float]] = {}  # mark and refunds
        self.days: dict[str, tuple[int, int]] = {}  # day and use
        self.kept: dict[str, Kept] = {}
        self.leases: dict[str, int] = {}
        self.slots: dict[str, dict[str, int]] = {}
        self._lease_us = lease_us

    @property
    def today(self) -> int:
        return self.now // DAY_US

    def reserve(self, its_id: str, dimensions: Dimensions, input_tokens: int, output_tokens: int) -> Result:
        assert its_id not in self.kept, "ids are fresh"
        waits = {each: self._wait(each, each.cost(input_tokens, output_tokens)) for each in dimensions.all}
        shadows = [each for each, wait in waits.items() if wait and each.is_shadow]
        refusing = [each for each, wait in waits.items() if wait and not each.is_shadow]
        if refusing:
            worst = max(refusing, key=lambda each: math.inf if waits[each] < 0 else waits[each])
            return Result(False, worst, waits[worst], shadows)
        charges = []
        for each in dimensions.all:
            if each in shadows:
                continue
            if each.kind is Kind.SLOTS:
                self.slots.setdefault(each.field, {})[its_id] = self.now + self._lease_us
                continue
            charge = self._charge(each, each.cost(input_tokens, output_tokens))
            if each.name != "requests_per_minute":
                charges.append(charge)
        self.kept[its_id] = Kept(input_tokens, output_tokens, charges)
        self.leases[its_id] = self.now + self._lease_us
        return Result(True, shadows=shadows)

    def settle(self, its_id: str, usage: tuple[int, int] | None, *, is_unsure: bool = False) -> bool:
        """`usage`: None: by rule."""
        kept = self.kept.pop(its_id, None)
        self.leases.pop(its_id, None)
        if usage is not None:  # else its slots end with its lease
            for slots in self.slots.values():
                slots.pop(its_id, None)
        if kept is not None and not kept.is_tombstone:
            true = (kept.input_tokens, kept.reported) if usage is None else usage
            for charge in kept.charges:
                reserved = charge.dimension.cost(kept.input_tokens, kept.output_tokens)
                more = charge.dimension.cost(*true) - reserved
                if more > 0:
                    self._charge(charge.dimension, more)
                elif more < 0:
                    self._refund(charge, -more)
        if is_unsure:
            self.kept[its_id] = Kept(0, 0, [], is_tombstone=True)
            self.leases[its_id] = self.now + self._lease_us
        return kept is not None and not kept.is_tombstone

    def renew(self, its_id: str, dimensions: Dimensions, output_so_far: int) -> None:
        kept = self.kept.get(its_id)
        ends_at = self.now + self._lease_us
        slots = [each.field for each in dimensions.all if each.kind is Kind.SLOTS]
        if kept is None:
            charges = [
                Charge(each, 0, 0)
                for each in dimensions.all
                if each.kind is not Kind.SLOTS and each.name != "requests_per_minute"
            ]
            kept = self.kept[its_id] = Kept(0, 0, charges)
            for name in slots:
                self.slots.setdefault(name, {})[its_id] = ends_at
        elif kept.is_tombstone:
            return
        for name in slots:
            if its_id in self.slots.get(name, {}):
                self.slots[name][its_id] = ends_at
        kept.reported = output_so_far
        self.leases[its_id] = ends_at

    def sweep(self) -> None:
        """Everything whose time has come; accounts that have run off are forgotten."""
        for its_id in sorted(self.leases, key=lambda each: (self.leases[each], each)):
            if self.leases[its_id] <= self.now:
                self.settle(its_id, None)
        self.rates = {name: its for name, its in self.rates.items() if its[0] >= self.now}
        self.days = {name: its for name, its in self.days.items() if its[0] >= self.today}

    def num_slots(self, name: str) -> int:
        slots = self.slots.get(name, {})
        for its_id in [its_id for its_id, ends_at in slots.items() if ends_at <= self.now]:
            del slots[its_id]
        return len(slots)

    def _wait(self, dimension: Dimension, cost: int) -> int:
        if dimension.kind is Kind.SLOTS:
            return 1_000_000 if self.num_slots(dimension.field) >= dimension.limit else 0
        if cost == 0:
            return 0
        if cost > dimension.burst:
            return -1
        if dimension.kind is Kind.DAY:
            day, used = self.days.get(dimension.field, (0, 0))
            used = used if day >= self.today else 0
            midnight = (max(day, self.today) + 1) * DAY_US - self.now
            return midnight if used + cost > dimension.limit else 0
        interval = MINUTE_US / dimension.limit
        mark = max(self.rates.get(dimension.field, (0, 0))[0], self.now)
        wait = mark + (cost - dimension.burst) * interval - self.now
        return math.ceil(wait) if wait > interval / 100 else 0

    def _charge(self, dimension: Dimension, cost: int) -> Charge:
        name = dimension.field
        if dimension.kind is Kind.DAY:
            day, used = self.days.get(name, (0, 0))
            self.days[name] = (day, used + cost) if day >= self.today else (self.today, cost)
            return Charge(dimension, *self.days[name])
        mark, refunded = self.rates.get(name, (0, 0))
        self.rates[name] = max(mark, self.now) + cost * MINUTE_US / dimension.limit, refunded
        return Charge(dimension, *self.rates[name])

    def _refund(self, charge: Charge, cost: int) -> None:
        name = charge.dimension.field
        if charge.dimension.kind is Kind.DAY:
            day, used = self.days.get(name, (0, 0))
            if day == charge.mark:
                self.days[name] = day, max(0, used - cost)
            return
        mark, refunded = self.rates.get(name, (0, 0))
        since = refunded - charge.refunded
        outstanding = 0 if since < 0 else charge.mark - since - self.now
        back = min(cost * MINUTE_US / charge.dimension.limit, outstanding)
        if back > 0:
            self.rates[name] = mark - back, refunded + back
