"""What the engine says: from the step loop to frames, in a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from engine_service.engine import Timeline
from engine_service.transport.inbox import GatewayAddress
from shared.identifiers import EngineEpoch
from shared.messages import (
    Bye,
    Dead,
    Embedded,
    EngineLoad,
    FromEngine,
    Heartbeat,
    Reject,
    SequenceUpdate,
    StepResult,
    encode,
)

HEARTBEAT_INTERVAL_S = 0.5
MAX_QUEUED_ITEMS = 1024  # steps; when that many wait the step loop does too
TO_ALL = GatewayAddress(b"")
_STOP_TIMEOUT_S = 2.0
STOP_FRAMES = [b"stop"]


@dataclass(frozen=True, slots=True)
class StepAnswers:
    """What one step has for each gateway, and the requests it ended."""

    updates: dict[GatewayAddress, list[SequenceUpdate]]
    load: EngineLoad
    finished: list[Timeline]


@dataclass(frozen=True, slots=True)
class Answer:
    """One message to one gateway, or to all with `TO_ALL`."""

    gateway: GatewayAddress
    message: Embedded | Reject | Bye | Dead


class _Stop:
    """Last item of the queue."""


class Outbox:
    """Encodes and hands on to the Router; heartbeats as well, so that a long step cannot delay them.

    `run` belongs to the output thread, which owns `wire`, a PUSH socket to the Router. All else may
    be called from any thread.
    """

    def __init__(
        self,
        wire: zmq.Socket[bytes],
        epoch: EngineEpoch,
        load: EngineLoad,
        on_finished: Callable[[Timeline], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load = load  # newest; replaced whole by the step loop, read by heartbeats and the registry
        self._wire = wire
        self._epoch = epoch
        self._on_finished = on_finished
        self._clock = clock
        self._items: queue.Queue[StepAnswers | Answer | _Stop] = queue.Queue(MAX_QUEUED_ITEMS)

    def put(self, item: StepAnswers | Answer) -> None:
        self._items.put(item)

    def stop(self) -> None:
        """After what was put before, the output thread and the Router end."""
        with contextlib.suppress(queue.Full):  # the output thread has failed and empties it no more
            self._items.put(_Stop(), timeout=_STOP_TIMEOUT_S)

    def run(self) -> None:
        next_heartbeat_s = self._clock()
        while True:
            if self._clock() >= next_heartbeat_s:
                self._send(TO_ALL, Heartbeat(self._epoch, self.load))
                next_heartbeat_s = self._clock() + HEARTBEAT_INTERVAL_S
            try:
                item = self._items.get(timeout=max(next_heartbeat_s - self._clock(), 0.0))
            except queue.Empty:
                continue
            match item:
                case StepAnswers():
                    self._send_step(item)
                case Answer():
                    self._send(item.gateway, item.message)
                case _Stop():
                    self._wire.send_multipart(STOP_FRAMES)
                    self._wire.close()
                    return

    def _send_step(self, answers: StepAnswers) -> None:
        for gateway, updates in answers.updates.items():
            self._send(gateway, StepResult(updates, answers.load))
        if self._on_finished is not None:
            for timeline in answers.finished:
                self._on_finished(timeline)

    def _send(self, gateway: GatewayAddress, message: FromEngine) -> None:
        # May block when the Router is behind, which never waits for anybody itself.
        self._wire.send_multipart([gateway, *encode(message)])
