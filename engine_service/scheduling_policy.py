"""Who runs next and who yields: the seam where other policies enter the scheduler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from engine_service.sequence import Sequence
from shared.identifiers import RequestId, TenantId


class Queued(Protocol):
    """What decides whose turn it is: of a sequence, or of a text that is to be embedded."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def tenant(self) -> TenantId: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


QueuedT = TypeVar("QueuedT", bound=Queued)


class SchedulingPolicy(Protocol):
    """Holds the waiting sequences in the order of their turn, and names victims of preemption."""

    def add(self, sequence: Sequence) -> None:
        """A new sequence takes its place."""

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence takes its place again."""

    def head(self) -> Sequence | None:
        """Whose turn it is; stays in the queue."""

    def remove(self, sequence: Sequence) -> None:
        """It was admitted, or it is not wanted any more."""

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Which running sequence yields its blocks. Candidates are in order of admission, never empty."""

    def yields_to(self, head: Sequence, running: list[Sequence]) -> Sequence | None:
        """Which running sequence makes room for a waiting one that finds none; None: it has to wait.

        Must not let two sequences push each other out in turn.
        """

    def admitted(self, sequence: Sequence) -> None:
        """It left the queue to run, for the first time or again."""

    def generated(self, sequence: Sequence, num_tokens: int) -> None:
        """A step gave it new tokens."""

    def ended(self, sequence: Sequence) -> None:
        """It will not come back. Called once for each sequence that was added."""

    def __iter__(self) -> Iterator[Sequence]: ...

    def __len__(self) -> int: ...


class FirstComeFirstServed(Generic[QueuedT]):
    """Arrival order; the newest running sequence yields and returns to the head.

    So the running sequences are always older than the waiting ones, and in arrival order.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[RequestId, QueuedT] = OrderedDict()  # removal by id is O(1)

    def add(self, sequence: QueuedT) -> None:
        self._waiting[sequence.request_id] = sequence

    def put_back(self, sequence: QueuedT) -> None:
        self._waiting[sequence.request_id] = sequence
        self._waiting.move_to_end(sequence.request_id, last=False)

    def head(self) -> QueuedT | None:
        return next(iter(self._waiting.values()), None)

    def remove(self, sequence: QueuedT) -> None:
        del self._waiting[sequence.request_id]

    def victim(self, candidates: list[QueuedT]) -> QueuedT:
        return candidates[-1]

    def yields_to(self, head: QueuedT, running: list[QueuedT]) -> QueuedT | None:
        return None

    def admitted(self, sequence: QueuedT) -> None:
        pass

    def generated(self, sequence: QueuedT, num_tokens: int) -> None:
        pass

    def ended(self, sequence: QueuedT) -> None:
        pass

    def __iter__(self) -> Iterator[QueuedT]:
        return iter(self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)
