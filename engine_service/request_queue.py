"""Accepted sequences that do not run: in the order of a policy, before it, or deferred."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from engine_service.refusal import Refusal
from engine_service.scheduling_policy import SchedulingPolicy
from engine_service.sequence import Sequence
from shared.identifiers import RequestId


class RequestQueue:
    """Bounded by requests and by tokens. A preempted sequence comes back whatever the bounds say.

    Deferred sequences are accepted, but lack something that is being made. They are outside of the policy's
    order, so that those behind them pass; they take their place in it when they lack nothing any more.

    Sequences that go on with a beam search are no requests: they are before the policy's order, since the
    search has had its turn, outside of the bounds, and the policy keeps no account of them. It has one of
    the search's first sequence, from `add` to `close_search`.
    """

    def __init__(self, policy: SchedulingPolicy, *, max_requests: int, max_tokens: int | None) -> None:
        """`max_tokens`: known tokens of those that wait; None: no bound."""
        self.policy = policy
        self._max_requests = max_requests
        self._max_tokens = max_tokens or math.inf
        self._deferred: dict[RequestId, Sequence] = {}
        self._going_on: OrderedDict[RequestId, Sequence] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests + len(self._going_on)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._going_on.values()
        yield from self.policy
        yield from self._deferred.values()

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def add(self, sequence: Sequence, *, is_deferred: bool) -> None:
        """A new sequence. Raises Refusal if there is no room."""
        if self._num_requests >= self._max_requests:
            raise Refusal("queue_full", f"{self._num_requests} requests are waiting already")
        # A long prompt is refused for what waits before it, never for its own length.
        if self._num_requests and self._num_tokens + sequence.num_tokens > self._max_tokens:
            raise Refusal("queue_full", f"{self._num_tokens} tokens are waiting already")
        self._num_tokens += sequence.num_tokens
        if is_deferred:
            self._deferred[sequence.request_id] = sequence
        else:
            self.policy.add(sequence)

    def undefer(self, sequence: Sequence) -> None:
        """The sequence lacks nothing any more."""
        del self._deferred[sequence.request_id]
        self.policy.add(sequence)

    def go_on(self, sequence: Sequence) -> None:
        """A sequence that goes on with a beam search, and finds no room just now."""
        self._going_on[sequence.request_id] = sequence

    def head(self) -> Sequence | None:
        """Whose turn it is; stays in the queue."""
        head = self.policy.head()
        going_on = next(iter(self._going_on.values()), None)
        if going_on is None or (head is not None and head.priority < going_on.priority):
            return head
        return going_on

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that ran and was preempted."""
        if sequence.goes_on:
            self._going_on[sequence.request_id] = sequence
            self._going_on.move_to_end(sequence.request_id, last=False)
            return
        self._num_tokens += sequence.num_tokens
        self.policy.put_back(sequence)

    def admit(self, sequence: Sequence) -> None:
        """The sequence leaves the queue to run."""
        if self._going_on.pop(sequence.request_id, None) is not None:
            return
        self.policy.remove(sequence)
        self._num_tokens -= sequence.num_tokens
        self.policy.admitted(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The sequence, which waits here, ends."""
        if self._going_on.pop(sequence.request_id, None) is not None:
            return
        self._num_tokens -= sequence.num_tokens
        if self._deferred.pop(sequence.request_id, None) is None:
            self.policy.remove(sequence)
            self.ended(sequence)

    def ended(self, sequence: Sequence) -> None:
        """A sequence that ran, or waited in the policy's order, has ended."""
        if sequence.search_id is None:
            self.policy.ended(sequence)

    def close_search(self, first: Sequence) -> None:
        """The beam search that began with this sequence, which was not deferred, is over."""
        self.policy.ended(first)

    @property
    def _num_requests(self) -> int:
        return len(self.policy) + len(self._deferred)

    def check(self) -> None:
        num_tokens = sum(sequence.num_tokens for sequence in self if not sequence.goes_on)
        assert num_tokens == self._num_tokens, "the tokens that wait are miscounted"
