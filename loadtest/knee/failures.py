"""What failed requests tell: how many there were, what the server said, and whether it is still there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loadtest.knee.probe import ProbedRequest

MAX_TEXTS = 2
MAX_TEXT_CHARACTERS = 160
NEARLY_ALL = 0.95
GONE_FROM_S = 3.0
GONE_OVER_S = 5.0
MIN_ENDED = 5


def failures_text(rows: Sequence[ProbedRequest], what: str = "requests") -> str:
    """`5 of 8 requests failed: ` and the texts, each once, the commonest first."""
    ended = ended_rows(rows)
    num_failed = sum(row.failed for row in ended)
    return f"{num_failed} of {len(ended)} {what} failed: {commonest_errors(ended)}"


def commonest_errors(rows: Sequence[ProbedRequest]) -> str:
    texts = Counter(
        (row.error.splitlines() or ["no reason was given"])[0][:MAX_TEXT_CHARACTERS]
        for row in rows
        if row.failed
    )
    told = "; ".join(text for text, _ in texts.most_common(MAX_TEXTS))
    return f"{told}; …" if len(texts) > MAX_TEXTS else told


def ended_rows(rows: Sequence[ProbedRequest]) -> list[ProbedRequest]:
    """Those that the server ended, or that never reached it."""
    return [row for row in rows if row.failed or (row.end_s is not None and not row.cut_off)]


def failed_share(rows: Sequence[ProbedRequest]) -> float:
    """Of those that ended; 0 if none did."""
    ended = ended_rows(rows)
    return sum(row.failed for row in ended) / max(len(ended), 1)


def is_gone(rows: Sequence[ProbedRequest], at_s: float) -> bool:
    """Whether nearly all of what was due in the last 5 s failed, and nothing of it still runs: a server
    under too much load answers some of its requests, one that is away none."""
    if at_s < GONE_FROM_S:
        return False
    recent = [row for row in rows if at_s - GONE_OVER_S <= row.due_s <= at_s]
    return len(ended_rows(recent)) >= MIN_ENDED and (
        sum(row.failed for row in recent) >= NEARLY_ALL * len(recent)
    )


def nothing_worked(rows: Sequence[ProbedRequest]) -> bool:
    """Whether nearly all of a probe's requests failed, be they few."""
    return bool(ended_rows(rows)) and sum(row.failed for row in rows) >= NEARLY_ALL * len(rows)
