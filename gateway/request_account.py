"""What one request for a model took and came to: filled on its way, told once at its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.generation import Usage
from shared.identifiers import EngineId, TenantId
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
    engine_id: EngineId | None = None  # of the last engine that had it
    response_id: str | None = None
    usage: Usage = NO_USAGE
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    failure: tuple[int, str | None] | None = None  # status and code of an error told within a stream
    outlives_exchange: bool = False  # it goes on in the background; who runs it closes it
    is_closed: bool = False

    def fell_back(self, variant: str, model: str) -> None:
        """Another variant than the assigned one is to answer."""
        self.variant, self.model = variant, model

    @property
    def charged(self) -> Usage:
        """What limits count. A request that failed before its first token costs nothing."""
        return self.usage if self.first_token_at is not None or self._was_left else NO_USAGE

    @property
    def _was_left(self) -> bool:
        return self.failure is None and self.engine_id is not None

    def record(self, status: int, error_code: str | None) -> UsageRecord:
        """`status`: of the HTTP answer, or 499."""
        if self.failure is not None:
            status, error_code = self.failure
        now, first, last = time.monotonic(), self.first_token_at, self.last_token_at
        return UsageRecord(
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
            input_tokens=self.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens,
            output_tokens=self.usage.completion_tokens,
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
