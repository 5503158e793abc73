"""Priority classes with ageing, and inside a class a fair share between tenants.

Between tenants: each has a virtual counter of the weighted tokens it was served, and the waiting tenant with
the least goes next (Sheng et al., OSDI 2024, arXiv 2401.00588). A tenant that comes back after a pause is
lifted to the least counter of those that are active, so that nobody saves up credit by being idle.

Between classes: the lower number goes first, but a sequence that has waited for `ageing_s` counts as one
class higher, after twice that as two, up to the highest, where the one that came first goes first. So
nothing starves, however much of a higher class keeps coming.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic

from engine_service.scheduling_policy import QueuedT
from shared.identifiers import RequestId, TenantId

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0  # an output token costs a step of its own
AGEING_S = 10.0
MAX_PREEMPTIONS = 4  # of one sequence, while any other can yield instead
MAX_IDLE_TENANTS = 10_000  # whose counters are remembered


class _TenantQueue(Generic[QueuedT]):
    """Waiting sequences of one tenant in one class: those that were preempted first, then by arrival."""

    def __init__(self) -> None:
        self.sequences: OrderedDict[RequestId, QueuedT] = OrderedDict()

    @property
    def head(self) -> QueuedT:
        return next(iter(self.sequences.values()))


class FairShare(Generic[QueuedT]):
    """A `SchedulingPolicy`; see there for what the methods promise."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        ageing_s: float = AGEING_S,
        max_preemptions: int = MAX_PREEMPTIONS,
    ) -> None:
        self._clock = clock
        self._ageing_s = ageing_s
        self._max_preemptions = max_preemptions
        self._classes: dict[int, dict[TenantId, _TenantQueue[QueuedT]]] = {}
        self._num_waiting = 0
        self._served: OrderedDict[TenantId, float] = OrderedDict()
        self._num_active: Counter[TenantId] = Counter()  # waiting and running sequences

    # ------------------------------------------------------------------ the queue

    def add(self, sequence: QueuedT) -> None:
        self._activate(sequence.tenant)
        self._queue_of(sequence).sequences[sequence.request_id] = sequence
        self._num_waiting += 1

    def put_back(self, sequence: QueuedT) -> None:
        queue = self._queue_of(sequence).sequences
        queue[sequence.request_id] = sequence
        queue.move_to_end(sequence.request_id, last=False)
        self._num_waiting += 1

    def head(self) -> QueuedT | None:
        turns = [self._turn_of(priority, tenants) for priority, tenants in self._classes.items()]
        return min(turns, key=lambda turn: turn[0])[1] if turns else None

    def remove(self, sequence: QueuedT) -> None:
        tenants = self._classes[sequence.priority]
        queue = tenants[sequence.tenant].sequences
        del queue[sequence.request_id]
        self._num_waiting -= 1
        if not queue:
            del tenants[sequence.tenant]
            if not tenants:
                del self._classes[sequence.priority]

    def __iter__(self) -> Iterator[QueuedT]:
        for tenants in self._classes.values():
            for queue in tenants.values():
                yield from queue.sequences.values()

    def __len__(self) -> int:
        return self._num_waiting

    # ------------------------------------------------------------------ who yields

    def victim(self, candidates: list[QueuedT]) -> QueuedT:
        """The lowest class, and of it the newest; a sequence that yielded often is spared if it can be."""
        spared = [s for s in candidates if s.num_preemptions < self._max_preemptions]
        lowest = max(sequence.priority for sequence in spared or candidates)
        return next(s for s in reversed(spared or candidates) if s.priority == lowest)

    def yields_to(self, head: QueuedT, running: list[QueuedT]) -> QueuedT | None:
        """The running sequence that makes room for a waiting one of a strictly higher class, if any does.

        By the classes that were asked for: one that has only aged must not push anybody out, or two
        sequences could push each other out in turn.
        """
        lower = [
            s for s in running if s.priority > head.priority and s.num_preemptions < self._max_preemptions
        ]
        return self.victim(lower) if lower else None

    # ------------------------------------------------------------------ what was served

    def admitted(self, sequence: QueuedT) -> None:
        if sequence.num_preemptions == 0:  # recomputing is our doing, not the tenant's
            self._served[sequence.tenant] += INPUT_WEIGHT * sequence.num_prompt_tokens

    def generated(self, sequence: QueuedT, num_tokens: int) -> None:
        self._served[sequence.tenant] += OUTPUT_WEIGHT * num_tokens

    def ended(self, sequence: QueuedT) -> None:
        self._num_active[sequence.tenant] -= 1
        if self._num_active[sequence.tenant] == 0:
            del self._num_active[sequence.tenant]
            self._forget_idle_tenants()

    def served(self, tenant: TenantId) -> float:
        """Weighted tokens; only differences between tenants that are active mean anything."""
        return self._served.get(tenant, 0.0)

    # ------------------------------------------------------------------ inside

    def _turn_of(
        self, priority: int, tenants: dict[TenantId, _TenantQueue[QueuedT]]
    ) -> tuple[tuple[int, float], QueuedT]:
        """The next sequence of a class, and its rank among those of all classes: lower goes first."""
        oldest = min((queue.head for queue in tenants.values()), key=lambda sequence: sequence.arrival_s)
        num_classes_higher = int((self._clock() - oldest.arrival_s) / self._ageing_s)
        if num_classes_higher > 0:
            return (max(0, priority - num_classes_higher), oldest.arrival_s), oldest
        # Insertion order breaks ties between counters, so that the choice can be replayed.
        tenant = min(tenants, key=lambda name: self._served[name])
        sequence = tenants[tenant].head
        return (priority, sequence.arrival_s), sequence

    def _queue_of(self, sequence: QueuedT) -> _TenantQueue[QueuedT]:
        tenants = self._classes.setdefault(sequence.priority, {})
        return tenants.setdefault(sequence.tenant, _TenantQueue())

    def _activate(self, tenant: TenantId) -> None:
        if self._num_active[tenant] == 0:
            active = [self._served[name] for name in self._num_active if self._num_active[name] > 0]
            lifted = max(self._served.get(tenant, 0.0), min(active, default=0.0))
            self._served[tenant] = lifted
            self._served.move_to_end(tenant)
        self._num_active[tenant] += 1

    def _forget_idle_tenants(self) -> None:
        while len(self._served) > MAX_IDLE_TENANTS + len(self._num_active):
            idle = next((name for name in self._served if name not in self._num_active), None)
            if idle is None:
                return
            del self._served[idle]
