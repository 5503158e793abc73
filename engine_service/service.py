"""An engine behind its socket: three threads, so that the wire never waits for a step.

    gateways <--> ROUTER <- Router thread -> Inbox -> request loop -> Outbox -> output thread -> Router thread

The Router thread alone touches the ROUTER socket. The output thread encodes, and hands frames to it
over an in-process PUSH/PULL pair, which is the queue and the wake-up in one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from engine_service.compute_thread import ComputeThread
from engine_service.engine import Timeline
from engine_service.request_loop import RequestLoop
from engine_service.transport.inbox import DrainRequested, Inbox
from engine_service.transport.outbox import MAX_QUEUED_ITEMS, TO_ALL, Answer, Outbox
from engine_service.transport.router import Router
from shared.identifiers import EngineEpoch, EngineId
from shared.messages import (
    PROTOCOL_VERSION,
    Dead,
    EngineHello,
    EngineLoad,
    GatewayHello,
    ModelCard,
)
from shared.text_bundle import TextBundle

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0  # for the output and Router threads to end once they were told to


@dataclass(frozen=True, slots=True)
class ServiceEnded:
    """`error` is None after a drain."""

    error: BaseException | None


MakeLoop = Callable[[Inbox, Outbox], RequestLoop[Any]]


class EngineService:
    """Runs an engine for the gateways that connect to `router`, a bound socket that it takes over.

    Its loop runs in `loop_thread`: that which has loaded the model, unless the steps are computed elsewhere.
    """

    def __init__(
        self,
        make_loop: MakeLoop,
        load: EngineLoad,
        card: ModelCard,
        text_bundle: TextBundle,
        router: zmq.Socket[bytes],
        loop_thread: ComputeThread,
        *,
        engine_id: EngineId,
        epoch: EngineEpoch,
        max_queued_requests: int,
        on_ended: Callable[[ServiceEnded], None],
        on_finished: Callable[[Timeline], None] | None = None,
    ) -> None:
        """`load` is that of the engine before its first request.

        `max_queued_requests` bounds those that arrive during one step, as it bounds the engine's queue.

        `on_ended` is called by one of the threads, then `close` must be called by another.
        """
        self._engine_id = engine_id
        self._epoch = epoch
        self._card = card
        self._text_bundle = text_bundle
        self._text_bundle_hash = text_bundle.content_hash
        pull, push = _wire(router.context)
        self._inbox = Inbox(max_queued_requests)
        self._outbox = Outbox(push, epoch, load, on_finished)
        self._router = Router(router, pull, self._inbox, self._hello_to)
        self._loop = make_loop(self._inbox, self._outbox)
        self._on_ended = on_ended
        self._threads = [
            threading.Thread(target=self._run, args=(role.run,), name=name, daemon=True)
            for name, role in (("router", self._router), ("output", self._outbox))
        ]
        self._loop_thread = loop_thread

    @property
    def load(self) -> EngineLoad:
        """After the last step."""
        return self._outbox.load

    @property
    def stalled_for_s(self) -> float:
        return self._loop.stalled_for_s

    def give_up(self, reason: str) -> None:
        """Tells all gateways that nothing they wait for will come."""
        self._outbox.put(Answer(TO_ALL, Dead(self._epoch, reason)))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._loop_thread.start(lambda: self._run(self._loop.run))

    def drain(self, limit_s: float) -> None:
        """Refuses new requests; the service ends when the accepted ones have, or after `limit_s`."""
        self._inbox.put(DrainRequested(limit_s))

    def close(self) -> None:
        """Sends what is left to be sent and ends the threads."""
        self._outbox.stop()
        for thread in self._threads:
            thread.join(_LAST_WORDS_S)
        self._loop_thread.close()
        self._loop_thread.join(_LAST_WORDS_S)

    def _run(self, role: Callable[[], None]) -> None:
        """Body of each thread: whatever ends one of them ends the service."""
        try:
            role()
        except BaseException as error:  # nothing at all may leave the engine half alive
            logger.critical("the %s thread failed", threading.current_thread().name, exc_info=True)
            if role == self._loop.run:  # the other two are what could tell anybody
                self._outbox.put(Answer(TO_ALL, Dead(self._epoch, f"{type(error).__name__}: {error}")))
            self._on_ended(ServiceEnded(error))
        else:
            self._on_ended(ServiceEnded(None))

    def _hello_to(self, hello: GatewayHello) -> EngineHello:
        is_known = self._text_bundle_hash in hello.known_bundles
        return EngineHello(
            PROTOCOL_VERSION,
            self._engine_id,
            self._epoch,
            self._card,
            self._text_bundle_hash,
            None if is_known else self._text_bundle,
        )


def _wire(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Both ends of the way from the output thread to the Router."""
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.setsockopt(zmq.RCVHWM, MAX_QUEUED_ITEMS)
    push.setsockopt(zmq.SNDHWM, MAX_QUEUED_ITEMS)
    push.setsockopt(zmq.LINGER, -1)  # the other end is this process; it reads until the last frame
    address = f"inproc://outbox-{id(pull)}"
    pull.bind(address)
    push.connect(address)
    return pull, push
