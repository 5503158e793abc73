"""What one server did in one case of one round, and how that is read from the client's result file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.peers.case import Case


@dataclass(frozen=True, slots=True)
class Measurement:
    """With an `error` the figures are not to be compared. None: all requests succeeded, as long as asked."""

    server: str
    round_number: int  # from 1
    case: str
    attempt: int = 1  # from 1; a run that others disturbed is repeated
    figures: Mapping[str, float] = field(default_factory=dict)  # by `Figure.key`
    foreign_cores: float | None = None  # that other processes had meanwhile; None: nothing was run
    error: str | None = None
    client: Mapping[str, Any] | None = None  # the client's own result, whole


def figures_of(result: Mapping[str, Any], case: Case) -> dict[str, float]:
    """The figures of a `headrace bench serve` result; what it could not know is left out."""
    due = {
        "output_tokens_per_s": result.get("output_throughput"),
        "total_tokens_per_s": result.get("total_token_throughput"),
        "ttft_p50_ms": result.get("median_ttft_ms"),
        "ttft_p95_ms": result.get("p95_ttft_ms"),
        "tpot_p50_ms": result.get("median_tpot_ms"),
        "itl_p50_ms": result.get("median_itl_ms"),
        "wall_s": result.get("duration"),
    }
    found = {key: float(value) for key, value in due.items() if isinstance(value, int | float)}
    if found.get("ttft_p50_ms"):
        found["prefill_tokens_per_s"] = case.prompt_len / found["ttft_p50_ms"] * 1e3
    return found


def error_of(result: Mapping[str, Any], case: Case) -> str | None:
    """Why the figures are not those of the case's work: failed requests, or another number of tokens.

    A prompt may count one token more than was sent: some servers put a beginning-of-sequence token first.
    """
    if result["failed"]:
        kinds = ", ".join(sorted(result["headrace"]["failures"]))
        return f"{result['failed']} of {result['num_prompts']} requests failed ({kinds})"
    num_output = result["total_output_tokens"]
    expected = case.num_requests * case.output_len
    if num_output is None:
        return "the server tells no usage"
    if num_output != expected:
        return f"answered with {num_output} tokens instead of {expected}"
    num_input, least = result["total_input_tokens"], case.num_requests * case.prompt_len
    if not least <= num_input <= least + case.num_requests:
        return f"read {num_input} tokens instead of {least}"
    return None
