"""The loop of a generating engine: step after step while there is something to compute."""

from __future__ import annotations

import logging

from engine_service.engine import Engine, StepOutcome
from engine_service.refusal import Refusal
from engine_service.request_loop import RequestLoop
from engine_service.transport.inbox import (
    EmbedReceived,
    GatewayAddress,
    InboxEvent,
    SubmitReceived,
    WakeUp,
)
from engine_service.transport.outbox import StepAnswers
from shared.messages import SequenceUpdate

logger = logging.getLogger(__name__)

_DEADLINE_CHECK_S = 0.1  # deadlines are looked at in steps; this often when there are none to make


class StepLoop(RequestLoop[Engine]):
    def run(self) -> None:
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

    def _step(self) -> StepOutcome:
        if self._engine.only_awaits_grammars:
            self._stalled_since_s = None  # their own time-out looks after these
        elif self._stalled_since_s is None:
            self._stalled_since_s = self._clock()
        outcome = self._engine.step(self._poll_aborts)
        if outcome.did_compute or not self._engine.has_work:  # all that was there may have expired
            self._stalled_since_s = None
        return outcome

    def _take_events(self) -> list[InboxEvent]:
        """All that have come; waits for some while there is nothing to compute."""
        if self._engine.only_awaits_grammars:
            return self._inbox.take(wait=True, timeout_s=_DEADLINE_CHECK_S)
        return self._inbox.take(wait=not self._engine.has_work and self._drain_until_s is None)

    def _take_submit(self, event: SubmitReceived) -> None:
        submit = event.submit
        self._accept(event.gateway, submit.request_id, lambda: self._engine.add(submit, event.received_s))

    def _take_embed(self, event: EmbedReceived) -> None:
        refusal = Refusal("invalid_request", "this engine generates text and makes no embeddings", "model")
        self._reject(event.gateway, event.embed.request_id, refusal)

    def _reset_prefix_cache(self) -> None:
        num_forgotten = self._engine.reset_prefix_cache()
        logger.info("the prefix cache was reset: %d blocks were forgotten", num_forgotten)

    def _publish(self, outcome: StepOutcome) -> None:
        for request_id, refusal in outcome.refusals:
            if (address := self._gateway_of.pop(request_id, None)) is not None:
                self._reject(address, request_id, refusal)
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
