"""One request for vectors, from its reservation to its settlement: the owner of what it has on an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace

from gateway.balancer import Choice
from gateway.engine_link import EngineLostError, EngineRejectedError
from gateway.errors import from_reject, interrupted, timed_out, upstream_error
from gateway.mailbox import VectorMailbox
from gateway.placement import Placement
from shared.identifiers import RequestId, TenantId, fresh_request_id
from shared.messages import Embed, Embedded
from shared.telemetry import inject

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """What is to be embedded, with everything checked."""

    token_id_lists: list[list[int]]
    dim: int  # numbers in each vector
    shortens: bool  # whether that is fewer than the model gives
    tenant: TenantId
    priority: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_id_lists))


class Embedding:
    """Runs a plan on an engine. `close` aborts it if it still runs, and is called on every path."""

    def __init__(self, plan: EmbeddingPlan, placement: Placement, span: trace.Span, timeout_s: float) -> None:
        self._plan = plan
        self._placement = placement
        self._span = span
        self._timeout_s = timeout_s
        self._request_id: RequestId | None = None
        self._mailbox = VectorMailbox()

    @property
    def choice(self) -> Choice | None:
        return self._placement.choice

    def start(self) -> None:
        """Chooses an engine and submits the texts. Raises ApiError 503 when there is none."""
        plan = self._plan
        # Nothing is cached that a place could be better for.
        link = self._placement.choose(None, plan.num_tokens)
        self._request_id = fresh_request_id()
        self._mailbox = VectorMailbox()
        message = Embed(
            request_id=self._request_id,
            token_id_lists=plan.token_id_lists,
            tenant=plan.tenant,
            priority=plan.priority,
            timeout_s=self._timeout_s,
            trace_context=inject(self._span),
            dimensions=plan.dim if plan.shortens else None,
        )
        link.embed(message, self._mailbox)

    async def vectors(self) -> Sequence[memoryview]:
        """float32, little-endian, of each text. Raises ApiError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                embedded = await self._take()
        except TimeoutError as error:
            raise timed_out("The engine did not answer in time.") from error
        return self._split(embedded)

    def close(self) -> None:
        """Idempotent. Must stay synchronous: it runs while being cancelled."""
        if self._placement.link is not None and self._request_id is not None:
            self._placement.link.abort([self._request_id])

    async def _take(self) -> Embedded:
        while True:
            try:
                return await self._mailbox.take()
            except EngineLostError as error:
                if not self._placement.may_move(error):
                    raise interrupted(error, by_a_step=error.by_a_step) from error
            except EngineRejectedError as error:
                # One that drains has given back what it could not finish: to whoever else is there.
                is_drained = error.reject.code == "draining"
                if not (is_drained and self._placement.may_move(EngineLostError(error.reject.message))):
                    raise from_reject(error.reject, "input") from error
            self.start()

    def _split(self, embedded: Embedded) -> Sequence[memoryview]:
        size = self._plan.dim * FLOAT_BYTES
        num_texts = len(self._plan.token_id_lists)
        if embedded.dim != self._plan.dim or len(embedded.vectors) != num_texts * size:
            raise upstream_error("The engine's answer does not have the size of what was asked for.")
        data = memoryview(embedded.vectors)
        return [data[index * size : (index + 1) * size] for index in range(num_texts)]
