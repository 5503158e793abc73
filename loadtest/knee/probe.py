"""What one probe saw: its requests, timed from when they were due, and what the server said meanwhile.

All times are seconds after the probe's begin, on the clock of whoever made the load: the real one, or
the virtual one of a simulated search. Nothing derived is stored, so that another SLO can be read out of
the same probe later.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from loadtest.server_metrics import ServerSample

__all__ = ["Probe", "ProbeKind", "ProbedRequest", "ServerSample"]

ProbeKind = Literal["unloaded", "saturation", "closed_loop", "open_loop", "validation"]


class ProbedRequest(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One request. Every latency counts from `due_s`, and that of a failure is infinite."""

    due_s: float
    sent_s: float | None
    first_token_s: float | None = None
    end_s: float | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None  # None: the server told no usage; then there is no TPOT
    failed: bool = False
    cut_off: bool = False  # we ended it, not the server: what it had not reached by `end_s` is unknown
    error: str = ""
    trace_id: str | None = None
    generator_lag_s: float | None = None  # of sent - due, what is the generator's fault: no connecting
    request_class: str = ""  # a tenant, or a class of a mixed workload

    @property
    def ttft_due(self) -> float:
        """Seconds from due to the first token; infinite for a failure, nan if cut off before it."""
        if self.failed:
            return math.inf
        if self.first_token_s is not None:
            return self.first_token_s - self.due_s
        if self.cut_off or self.end_s is None:
            return math.nan
        return self.end_s - self.due_s  # an answer without content showed nothing before its end

    @property
    def e2el_due(self) -> float:
        """Seconds from due to the end; infinite for a failure, nan if cut off."""
        if self.failed:
            return math.inf
        if self.cut_off or self.end_s is None:
            return math.nan
        return self.end_s - self.due_s

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one token or of unknown length.

        Infinite for a failure, nan if cut off.
        """
        if self.failed:
            return math.inf
        if self.cut_off or self.end_s is None:
            return math.nan
        if self.num_output_tokens is None or self.num_output_tokens < 2 or self.first_token_s is None:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def dispatch_lag(self) -> float | None:
        """Seconds from due to sent: the generator's own delay, as far as that is known apart. None: never
        sent."""
        if self.generator_lag_s is not None:
            return self.generator_lag_s
        return None if self.sent_s is None else self.sent_s - self.due_s


class Probe(msgspec.Struct, kw_only=True):
    """One stretch of load of one kind.

    The measured window holds the requests that were due in [warm_cut_s, end_s); `drained_s` is when
    the last answer came or was given up.
    """

    kind: ProbeKind
    rate: float | None = None  # offered requests/s; None in a closed loop
    cv: float | None = None  # of the gaps between arrivals; None in a closed loop
    concurrency: int | None = None  # of a closed loop
    begin_s: float  # seconds after the search's begin
    warm_cut_s: float = 0.0
    end_s: float  # when the last request was due at the latest, or the probe was ended early
    drained_s: float
    ended_early: bool = False  # hopeless: the rest of its requests were not made
    requests: list[ProbedRequest] = []
    in_flight: list[
        tuple[float, int]
    ] = []  # (seconds, requests sent and not ended), counted by the generator
    samples: list[ServerSample] = []

    @property
    def measured(self) -> list[ProbedRequest]:
        """The requests that were due inside of the measured window."""
        return [one for one in self.requests if self.warm_cut_s <= one.due_s < self.end_s]
