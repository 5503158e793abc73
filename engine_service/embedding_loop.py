"""The loop of an embedding engine: pass after pass while texts wait."""

from __future__ import annotations

from engine_service.embedding_engine import EmbeddingEngine, PassOutcome
from engine_service.refusal import Refusal
from engine_service.request_loop import RequestLoop
from engine_service.transport.inbox import EmbedReceived, SubmitReceived
from engine_service.transport.outbox import Answer, StepAnswers


class EmbeddingLoop(RequestLoop[EmbeddingEngine]):
    def run(self) -> None:
        while not self._is_drained():
            waits = not self._engine.has_work and self._drain_until_s is None
            for event in self._inbox.take(wait=waits):
                self._handle(event)
            self._publish(self._engine.drop_expired())
            has_pass = self._engine.schedule()
            self._outbox.load = self._engine.load()
            if has_pass:
                outcome = self._compute()
                self._outbox.load = self._engine.load()
                self._publish(outcome)
        self._give_up()

    def _compute(self) -> PassOutcome:
        self._stalled_since_s = self._clock()
        outcome = self._engine.compute(self._poll_aborts)
        self._stalled_since_s = None
        return outcome

    def _take_embed(self, event: EmbedReceived) -> None:
        embed = event.embed
        self._accept(event.gateway, embed.request_id, lambda: self._engine.add(embed, event.received_s))

    def _take_submit(self, event: SubmitReceived) -> None:
        refusal = Refusal("invalid_request", "this engine makes embeddings and generates nothing", "model")
        self._reject(event.gateway, event.submit.request_id, refusal)

    def _reset_prefix_cache(self) -> None:
        """There is none."""

    def _publish(self, outcome: PassOutcome) -> None:
        for request_id, refusal in outcome.refusals:
            self._reject(self._gateway_of.pop(request_id), request_id, refusal)
        for embedded in outcome.embedded:
            self._outbox.put(Answer(self._gateway_of.pop(embedded.request_id), embedded))
        if outcome.finished:
            self._outbox.put(StepAnswers({}, self._outbox.load, outcome.finished))
