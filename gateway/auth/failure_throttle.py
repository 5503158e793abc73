"""How many unknown keys one client address may try: a bound of the work that guessing makes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address

from shared.networks import Address

MAX_ADDRESSES = 10_000
ROUNDING_S = 1e-6  # of floats: less is no wait
IPV6_PREFIX_BITS = 64  # one client has so many addresses that they count as one


class FailureThrottle:
    """GCRA for each address, of this gateway alone. Forgets addresses that have not failed for longest."""

    def __init__(self, max_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_per_minute` is also the burst; 0: nobody is ever throttled."""
        self._interval_s = 60 / max_per_minute if max_per_minute else 0.0
        self._clock = clock
        self._free_again_at: OrderedDict[int, float] = OrderedDict()  # when all of its failures are forgotten

    def wait_s(self, address: Address | None) -> float:
        """So long it has to wait before the next attempt; 0: it may try now."""
        if not self._interval_s or address is None:
            return 0.0
        free_again_at = self._free_again_at.get(_group_of(address), 0.0)
        wait_s = free_again_at - self._clock() - (60 - self._interval_s)
        return wait_s if wait_s > ROUNDING_S else 0.0

    def failed(self, address: Address | None) -> None:
        if not self._interval_s or address is None:
            return
        group, now = _group_of(address), self._clock()
        self._free_again_at[group] = max(self._free_again_at.get(group, 0.0), now) + self._interval_s
        self._free_again_at.move_to_end(group)
        if len(self._free_again_at) > MAX_ADDRESSES:
            self._free_again_at.popitem(last=False)


def _group_of(address: Address) -> int:
    if isinstance(address, IPv6Address):
        # Below zero, where no IPv4 address is.
        return -1 - (int(address) >> (128 - IPV6_PREFIX_BITS))
    return int(address)
