"""What one request for a model took and came to: filled on its way, told once at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.generation import Usage
from gateway.routing.draw import Draw
from gateway.text_delta import TextDelta
from shared.identifiers import EngineId, TenantId, fresh_request_id
from shared.usage import Outcome, UsageRecord

CLIENT_LEFT = 499  # in logs and figures only, as nginx has it
NO_USAGE = Usage(0, 0, 0)


@dataclass(slots=True, eq=False)
class RequestAccount:
    """Owned by the request's exchange; `gateway/ledger.py` closes it. Times are of time.monotonic."""

    request_id: str
    tenant: TenantId
    key_id: str
    operation: str
    route: str
    experiment_version: int
    assigned_variant: str
    variant: str
    model: str
    subject_hash: int
    arrived_at: float
    is_streamed: bool = False
    is_shadow: bool = False
    is_overridden: bool = False  # the variant was chosen for it, so it counts for no experiment
    draw: Draw | None = None  # of the experiment that it counts for
    engine_id: EngineId | None = None  # of the last engine that had it
    response_id: str | None = None
    usage: Usage = NO_USAGE
    first_token_at: float | None = None  # from the engine: its client need not have been told
    last_token_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    failure: tuple[int, str | None] | None = None  # status and code of an error told within a stream
    was_left: bool = False  # by its client, before it had ended
    is_due: bool = False  # its client was told some of the answer; of a copy: there is some
    outlives_exchange: bool = False  # it goes on in the background; who runs it closes it
    is_closed: bool = False

    def generated(self, deltas: Sequence[TextDelta]) -> None:
        """Tokens of a copy have come, now."""
        self.is_due = True
        self.last_token_at = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at
        self.finish_reasons += [delta.finish_reason for delta in deltas if delta.finish_reason is not None]

    def fell_back(self, variant: str, model: str) -> None:
        """Another variant is to answer, from the beginning."""
        self.variant, self.model = variant, model
        self.usage = NO_USAGE
        self.first_token_at = self.last_token_at = None
        self.is_due = False
        self.finish_reasons = []

    def of_shadow(self, variant: str, model: str) -> RequestAccount:
        """Of a copy of this request, which begins now."""
        return RequestAccount(
            request_id=self.request_id,
            tenant=self.tenant,
            key_id=self.key_id,
            operation=self.operation,
            route=self.route,
            experiment_version=self.experiment_version,
            assigned_variant=variant,
            variant=variant,
            model=model,
            subject_hash=self.subject_hash,
            arrived_at=time.monotonic(),
            is_streamed=self.is_streamed,
            is_shadow=True,
        )

    @property
    def charged(self) -> Usage:
        """What limits count. A request that failed before its client was told a token costs nothing, whatever
        the engine had made of it; one that its client has left costs what an engine was given to compute for
        it."""
        was_left = self.was_left or (self.failure is not None and self.failure[0] == CLIENT_LEFT)
        return self.usage if self.is_due or (was_left and self.engine_id is not None) else NO_USAGE

    def record(self, status: int, error_code: str | None) -> UsageRecord:
        """`status`: of the HTTP answer, or 499."""
        if self.failure is not None:
            status, error_code = self.failure
        now, first, last = time.monotonic(), self.first_token_at, self.last_token_at
        # Who has got nothing and was told so pays nothing; who left has had it computed.
        is_charged = self.is_due or status < 400 or status == CLIENT_LEFT
        usage = self.usage if is_charged else NO_USAGE
        return UsageRecord(
            record_id=fresh_request_id(),
            request_id=self.request_id,
            arrived_at=time.time() - (now - self.arrived_at),
            tenant=self.tenant,
            key_id=self.key_id,
            operation=self.operation,
            route=self.route,
            experiment_version=self.experiment_version,
            assigned_variant=self.assigned_variant,
            variant=self.variant,
            model=self.model,
            engine_id=self.engine_id,
            response_id=self.response_id,
            subject_hash=self.subject_hash,
            is_streamed=self.is_streamed,
            is_shadow=self.is_shadow,
            is_overridden=self.is_overridden,
            input_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            time_to_first_token_s=None if first is None else first - self.arrived_at,
            duration_s=now - self.arrived_at,
            generation_s=None if first is None or last is None else last - first,
            finish_reasons=self.finish_reasons,
            outcome=_outcome_of(status),
            status=status,
            error_code=error_code,
        )


def _outcome_of(status: int) -> Outcome:
    if status == CLIENT_LEFT:
        return "aborted"
    if status < 400:
        return "ok"
    return "refused" if status < 500 else "failed"
