"""What is kept of a request for a model when it has ended: for billing, for figures of experiments."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.identifiers import EngineId, TenantId

# "ok": answered whole, or to its last event; "refused": 4xx, also by a limit; "failed": 5xx, or an error
# event in a stream; "aborted": its client left.
Outcome = Literal["ok", "refused", "failed", "aborted"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times are seconds; those that were not reached are None."""

    record_id: str = ""  # of this row, and of no other: a client may send one x-request-id twice
    request_id: str  # as in x-request-id
    arrived_at: float  # unix time
    tenant: TenantId
    key_id: str
    operation: str  # gen_ai.operation.name
    route: str  # the name that the client sent as `model`; "": it was refused before it had a route
    experiment_version: int
    assigned_variant: str  # by the split: what an experiment counts it for
    variant: str  # that has answered, after overrides and fallbacks
    model: str
    engine_id: EngineId | None = None  # None: it did not come so far
    response_id: str | None = None
    subject_hash: int = 0  # of whom the assignment sticks to, 64 bits without a sign
    is_streamed: bool = False
    is_shadow: bool = False  # a copy that nobody asked for, and nobody pays
    is_overridden: bool = False  # tenant or client chose the variant: counts for no experiment
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input, found in a prefix cache
    output_tokens: int = 0
    time_to_first_token_s: float | None = None
    duration_s: float = 0.0  # until the last byte
    generation_s: float | None = None  # from the first token to the last
    finish_reasons: list[str] = []
    outcome: Outcome = "ok"
    status: int = 200  # of HTTP; 499: the client left
    error_code: str | None = None

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean over the tokens behind the first one."""
        if self.generation_s is None or self.output_tokens < 2:
            return None
        return self.generation_s / (self.output_tokens - 1)
