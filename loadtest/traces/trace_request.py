"""One request of a trace: when it came, how long it was, and what it shared with others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float  # on the trace's own clock
    num_input_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()  # of the prompt's blocks: equal ones hold equal tokens
    num_shared_tokens: int = 0  # that were found in a prefix cache; the beginning of the tenant's prompts
    tenant: str = ""
