"""Unix seconds as dates, as far as there are any."""

from __future__ import annotations

from datetime import UTC, datetime

END_OF_DATES = datetime(9000, 1, 1, tzinfo=UTC).timestamp()  # later ones may not be shown in every zone


def date_of(seconds: float) -> datetime | None:
    """In UTC. None: it is no moment of a calendar; Redis may hold any number."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
