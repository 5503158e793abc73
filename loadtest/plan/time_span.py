"""Times on the command line: 500ms, 30s, 5m, 1h."""

from __future__ import annotations

import re

from shared.errors import ConfigError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", re.ASCII)


def parse_time_span(text: str, flag: str) -> float:
    """Seconds, at least one millisecond. Raises ConfigError."""
    found = _SPAN.fullmatch(text.strip())
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if seconds < 0.001:
        raise ConfigError(f"{text.strip()!r} is not a time above zero, like 30s or 5m", flag)
    return seconds
