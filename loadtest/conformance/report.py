"""What a run came to: a table for the terminal, and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from loadtest.conformance.server import Target
from loadtest.conformance.suite import Outcome, Result

MARKS = {Outcome.PASSED: "passed", Outcome.FAILED: "FAILED", Outcome.NOT_APPLICABLE: "n/a"}
MAX_REASON = 200


def line_of(result: Result, width: int) -> str:
    """One row; `width`: of the longest name."""
    reason = result.reason if len(result.reason) <= MAX_REASON else result.reason[: MAX_REASON - 1] + "…"
    return f"{MARKS[result.outcome]:<6}  {result.row.name:<{width}}  {reason}".rstrip()


def closing_line(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome)


def document_of(target: Target, results: Sequence[Result]) -> str:
    """JSON, without keys."""
    rows = [
        {
            "group": result.row.group,
            "row": result.row.name,
            "proves": result.row.proves,
            "outcome": result.outcome.value,
            "reason": result.reason,
            "duration_s": round(result.duration_s, 4),
        }
        for result in results
    ]
    counts = Counter(result.outcome.value for result in results)
    document = {"url": target.url, "model": target.model, "counts": dict(counts), "rows": rows}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
