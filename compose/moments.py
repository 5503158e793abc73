"""Times as people write them on a command line, and as they are shown to them. All in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from shared.errors import ConfigError
from shared.moments import END_OF_DATES, date_of

_SECONDS_IN = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,9})([smhdw])")


def duration_s(text: str, option: str) -> float:
    """Of "90s", "45m", "24h", "30d" or "2w". Raises ConfigError that names the option."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option}: {text!r} is no duration; write 45m, 24h, 30d or 2w", option)
    return float(int(match[1]) * _SECONDS_IN[match[2]])


def moment(text: str, option: str, now: float) -> float:
    """Unix seconds: of a duration from now, a date or a time in ISO 8601. Raises ConfigError."""
    if _DURATION.fullmatch(text.strip()):
        seconds = now + duration_s(text, option)
    else:
        try:
            parsed = datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise ConfigError(
                f"{option}: {text!r} is neither a duration (30d) nor a date (2027-01-31, 2027-01-31T12:00Z)",
                option,
            ) from error
        seconds = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds < END_OF_DATES:
        raise ConfigError(f"{option}: {text!r} is too far away", option)
    return seconds


def past_moment(text: str, option: str, now: float) -> float:
    """Unix seconds: so long ago, or a date or a time in ISO 8601. Raises ConfigError."""
    if _DURATION.fullmatch(text.strip()):
        return max(0.0, now - duration_s(text, option))
    return moment(text, option, now)


def shown(seconds: float | None, otherwise: str = "–") -> str:
    """What is no date is shown as the number that it is."""
    return otherwise if seconds is None else _written(seconds, "%Y-%m-%d %H:%M:%SZ")


def in_json(seconds: float | None) -> str | None:
    return None if seconds is None else _written(seconds, "%Y-%m-%dT%H:%M:%SZ")


def _written(seconds: float, form: str) -> str:
    date = date_of(seconds)
    return str(seconds) if date is None else date.strftime(form)
