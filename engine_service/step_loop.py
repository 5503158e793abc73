"""The thread that computes: takes events in, makes steps, hands answers out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from engine_service.engine import Engine, StepOutcome
from engine_service.refusal import Refusal
from engine_service.transport.inbox import (
    AbortReceived,
    DrainRequested,
    GatewayAddress,
    GatewayLost,
    Inbox,
    InboxEvent,
    SubmitReceived,
    WakeUp,
)
from engine_service.transport.outbox import TO_ALL, Answer, Outbox, StepAnswers
from shared.identifiers import EngineEpoch, RequestId
from shared.messages import Bye, Reject, RejectCode, SequenceUpdate

logger = logging.getLogger(__name__)

_DEADLINE_CHECK_S = 0.1  # deadlines are looked at in steps; this often when there are none to make


class StepLoop:
    """Owns the engine, and knows which gateway each request belongs to."""

    def __init__(
        self,
        engine: Engine,
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

    def run(self) -> None:
        """Until the engine is drained. A step that fails raises, and ends the engine with it."""
        self._engine.wake_with(lambda: self._inbox.put(WakeUp()))
        try:
            self._run_until_drained()
        finally:
            self._engine.close()

    def _run_until_drained(self) -> None:
        while not self._is_drained():
            for event in self._take_events():
                self._handle(event)
            outcome = self._step() if self._engine.has_work else None
            self._outbox.load = self._engine.load()
            if outcome is not None:
                self._publish(outcome)
        self._give_up()

    @property
    def stalled_for_s(self) -> float:
        """How long there has been something to compute without a step being done. For other threads."""
        since_s = self._stalled_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def _step(self) -> StepOutcome:
        if self._engine.only_awaits_grammars:
            self._stalled_since_s = None  # their own time-out looks after these
        elif self._stalled_since_s is None:
            self._stalled_since_s = self._clock()
        outcome = self._engine.step(self._poll_aborts)
        if outcome.did_compute:
            self._stalled_since_s = None
        return outcome

    def _take_events(self) -> list[InboxEvent]:
        """All that have come; waits for some while there is nothing to compute."""
        if self._engine.only_awaits_grammars:
            return self._inbox.take(wait=True, timeout_s=_DEADLINE_CHECK_S)
        return self._inbox.take(wait=not self._engine.has_work and self._drain_until_s is None)

    def _handle(self, event: InboxEvent) -> None:
        match event:
            case SubmitReceived():
                self._accept(event)
            case AbortReceived():
                for request_id in self._own(event):
                    self._abort(request_id)
            case GatewayLost():
                for request_id in [key for key, owner in self._gateway_of.items() if owner == event.gateway]:
                    self._abort(request_id)
            case DrainRequested():
                self._drain_until_s = self._clock() + event.limit_s
                self._outbox.put(Answer(TO_ALL, Bye(self._epoch)))
            case WakeUp():
                pass  # the next step looks for what has come

    def _accept(self, event: SubmitReceived) -> None:
        request_id = event.submit.request_id
        if self._drain_until_s is not None:
            self._reject(event.gateway, request_id, "draining", "the engine is about to stop")
            return
        try:
            self._engine.add(event.submit, event.received_s)
        except Refusal as refusal:
            self._reject(event.gateway, request_id, refusal.code, refusal.message, refusal.param)
        else:
            self._gateway_of[request_id] = event.gateway

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

    def _abort(self, request_id: RequestId) -> None:
        del self._gateway_of[request_id]
        timeline = self._engine.abort(request_id)
        if timeline is not None:
            self._outbox.put(StepAnswers({}, self._outbox.load, [timeline]))

    def _publish(self, outcome: StepOutcome) -> None:
        for request_id, refusal in outcome.refusals:
            if (address := self._gateway_of.pop(request_id, None)) is not None:
                self._reject(address, request_id, refusal.code, refusal.message, refusal.param)
        updates: dict[GatewayAddress, list[SequenceUpdate]] = {}
        for update in outcome.updates:
            gateway = self._gateway_of.get(update.request_id)
            if gateway is None:
                continue  # it expired, and was aborted while the step ran
            updates.setdefault(gateway, []).append(update)
            if update.finish_reason is not None:
                del self._gateway_of[update.request_id]
        if updates or outcome.finished:
            self._outbox.put(StepAnswers(updates, self._outbox.load, outcome.finished))

    def _is_drained(self) -> bool:
        if self._drain_until_s is None:
            return False
        return not self._engine.has_work or self._clock() >= self._drain_until_s

    def _give_up(self) -> None:
        """Ends what did not finish within the drain limit, so that gateways can carry on elsewhere."""
        if self._gateway_of:
            logger.warning("drain limit reached with %d requests unfinished", len(self._gateway_of))
        for request_id, gateway in list(self._gateway_of.items()):
            self._reject(gateway, request_id, "draining", "the engine stopped before the request was done")
            self._abort(request_id)
        self._outbox.load = self._engine.load()

    def _reject(
        self,
        gateway: GatewayAddress,
        request_id: RequestId,
        code: RejectCode,
        message: str,
        param: str | None = None,
    ) -> None:
        self._outbox.put(Answer(gateway, Reject(request_id, code, message, param)))
