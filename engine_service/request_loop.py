"""The thread that computes: what the loops of generating and of embedding engines have in common."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from engine_service.engine import Timeline
from engine_service.refusal import Refusal
from engine_service.transport.inbox import (
    AbortReceived,
    DrainRequested,
    EmbedReceived,
    GatewayAddress,
    GatewayLost,
    Inbox,
    InboxEvent,
    PrefixCacheReset,
    SubmitReceived,
    WakeUp,
)
from engine_service.transport.outbox import TO_ALL, Answer, Outbox, StepAnswers
from shared.identifiers import EngineEpoch, RequestId
from shared.messages import Bye, EngineLoad, Reject

logger = logging.getLogger(__name__)


class LoopedEngine(Protocol):
    @property
    def has_work(self) -> bool: ...

    def abort(self, request_id: RequestId) -> Timeline | None:
        """Ends a request; None if it has ended or was never known."""

    def load(self) -> EngineLoad: ...


EngineT = TypeVar("EngineT", bound=LoopedEngine)


class RequestLoop(ABC, Generic[EngineT]):
    """Owns the engine, and knows whose each request is. Takes events in, hands answers out."""

    def __init__(
        self,
        engine: EngineT,
        inbox: Inbox,
        outbox: Outbox,
        epoch: EngineEpoch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._epoch = epoch
        self._clock = clock
        self._gateway_of: dict[RequestId, GatewayAddress] = {}
        self._drain_until_s: float | None = None
        self._stalled_since_s: float | None = None

    @abstractmethod
    def run(self) -> None:
        """Until the engine is drained. A step that fails raises, and ends the engine with it."""

    @property
    def stalled_for_s(self) -> float:
        """How long there has been something to compute without a step being done. For other threads."""
        since_s = self._stalled_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    # ------------------------------------------------------------------ events

    @abstractmethod
    def _take_submit(self, event: SubmitReceived) -> None: ...

    @abstractmethod
    def _take_embed(self, event: EmbedReceived) -> None: ...

    @abstractmethod
    def _reset_prefix_cache(self) -> None: ...

    def _handle(self, event: InboxEvent) -> None:
        match event:
            case SubmitReceived():
                self._take_submit(event)
            case EmbedReceived():
                self._take_embed(event)
            case AbortReceived():
                for request_id in self._own(event):
                    self._abort(request_id)
            case GatewayLost():
                for request_id in [key for key, owner in self._gateway_of.items() if owner == event.gateway]:
                    self._abort(request_id)
            case DrainRequested():
                self._drain_until_s = self._clock() + event.limit_s
                self._outbox.put(Answer(TO_ALL, Bye(self._epoch)))
            case PrefixCacheReset():
                self._reset_prefix_cache()
            case WakeUp():
                pass  # the next step looks for what has come

    def _accept(self, gateway: GatewayAddress, request_id: RequestId, add: Callable[[], None]) -> None:
        """Runs `add`, which raises Refusal for what the engine does not take."""
        try:
            if self._drain_until_s is not None:
                raise Refusal("draining", "the engine is about to stop")
            add()
        except Refusal as refusal:
            self._reject(gateway, request_id, refusal)
        else:
            self._gateway_of[request_id] = gateway

    def _own(self, event: AbortReceived) -> list[RequestId]:
        """Those of the ids that run here for the gateway that asks."""
        named_once = dict.fromkeys(event.request_ids)
        return [key for key in named_once if self._gateway_of.get(key) == event.gateway]

    def _poll_aborts(self) -> Iterable[RequestId]:
        """Called by the engine right after the model has returned; it aborts what is named here."""
        for event in self._inbox.take_fast_aborts():
            for request_id in self._own(event):
                del self._gateway_of[request_id]
                yield request_id

    # ------------------------------------------------------------------ ends of requests

    def _abort(self, request_id: RequestId) -> None:
        del self._gateway_of[request_id]
        timeline = self._engine.abort(request_id)
        if timeline is not None:
            self._outbox.put(StepAnswers({}, self._outbox.load, [timeline]))

    def _reject(self, gateway: GatewayAddress, request_id: RequestId, refusal: Refusal) -> None:
        reject = Reject(request_id, refusal.code, refusal.message, refusal.param)
        self._outbox.put(Answer(gateway, reject))

    # ------------------------------------------------------------------ the end of all

    def _is_drained(self) -> bool:
        if self._drain_until_s is None:
            return False
        return not self._engine.has_work or self._clock() >= self._drain_until_s

    def _give_up(self) -> None:
        """Ends what did not finish within the drain limit, so that gateways can carry on elsewhere."""
        if self._gateway_of:
            logger.warning("drain limit reached with %d requests unfinished", len(self._gateway_of))
        for request_id, gateway in list(self._gateway_of.items()):
            refusal = Refusal("draining", "the engine stopped before the request was done")
            self._reject(gateway, request_id, refusal)
            self._abort(request_id)
        self._outbox.load = self._engine.load()
