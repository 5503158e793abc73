"""What reaches the step loop: requests, aborts, the end of a gateway, orders to stop."""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass
from typing import NewType

from shared.identifiers import RequestId
from shared.messages import Embed, Submit

GatewayAddress = NewType("GatewayAddress", bytes)
"""The ROUTER's name for a connected gateway: first frame of every message from and to it."""


@dataclass(frozen=True, slots=True)
class SubmitReceived:
    gateway: GatewayAddress
    submit: Submit
    received_s: float  # monotonic


@dataclass(frozen=True, slots=True)
class EmbedReceived:
    gateway: GatewayAddress
    embed: Embed
    received_s: float  # monotonic


@dataclass(frozen=True, slots=True)
class AbortReceived:
    gateway: GatewayAddress
    request_ids: list[RequestId]


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """Nobody reads this gateway's answers any more."""

    gateway: GatewayAddress


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Take no more requests; end when the accepted ones have, at the latest after `limit_s`."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """What is cached is to be forgotten."""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """The engine has something new to look at."""


InboxEvent = (
    SubmitReceived | EmbedReceived | AbortReceived | GatewayLost | DrainRequested | PrefixCacheReset | WakeUp
)

_NUM_FAST_ABORTS = 10_000


class Inbox:
    """From the socket's thread to the step loop. Requests are bounded; the rest must never be lost.

    An abort goes two ways: in order with the requests, lest it overtakes the one it means, and on a
    fast path that the step loop looks at as soon as the model has returned. Aborting twice is harmless.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._events: queue.SimpleQueue[InboxEvent] = queue.SimpleQueue()
        self._fast_aborts: deque[AbortReceived] = deque(maxlen=_NUM_FAST_ABORTS)

    def offer(self, event: SubmitReceived | EmbedReceived) -> bool:
        """False when too many events wait already; the request is then refused on the spot."""
        if self._events.qsize() >= self._max_requests:  # no race: the socket's thread alone adds requests
            return False
        self._events.put(event)
        return True

    def put(self, event: AbortReceived | GatewayLost | DrainRequested | PrefixCacheReset | WakeUp) -> None:
        if isinstance(event, AbortReceived):
            self._fast_aborts.append(event)
        self._events.put(event)

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[InboxEvent]:
        """All events that are there, in order; with `wait` at least one, unless the timeout passes."""
        events: list[InboxEvent] = []
        try:
            if wait:
                events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def take_fast_aborts(self) -> list[AbortReceived]:
        aborts: list[AbortReceived] = []
        while self._fast_aborts:  # the step loop alone takes from it
            aborts.append(self._fast_aborts.popleft())
        return aborts
