"""What is promised to users: a share of all requests within limits on their latencies."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shared.errors import ConfigError

LATENCY_NAMES = ("ttft", "tpot", "e2el")
DEFAULT_TIER_NAME = "default"
DEFAULT_ATTAINMENT = 0.95
UNITS_S = {"ms": 0.001, "s": 1.0}

_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s)", re.ASCII)
_TIER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class SloTier:
    """`attainment` of all requests keep every limit that is set. TTFT and E2EL count from the due time."""

    name: str = DEFAULT_TIER_NAME
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None
    attainment: float = DEFAULT_ATTAINMENT

    @property
    def limits_s(self) -> dict[str, float]:
        """The limits that are set, by the name of the latency."""
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def __str__(self) -> str:
        limits = ", ".join(f"{name} ≤ {_written(limit)}" for name, limit in self.limits_s.items())
        return f"{self.attainment:.4g} of requests with {limits}"


def parse_slo(
    text: str, attainment: float = DEFAULT_ATTAINMENT, name: str = DEFAULT_TIER_NAME, flag: str = "--slo"
) -> SloTier:
    """`ttft=500ms,tpot=50ms`, with `@0.9` at the end for another attainment. Raises ConfigError."""
    limits_text, at, share = text.partition("@")
    if at:
        attainment = parse_share(share, flag)
    limits: dict[str, float] = {}
    for part in limits_text.split(","):
        latency, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"{part.strip()!r} is not of the form NAME=DURATION, like ttft=500ms", flag)
        if latency not in LATENCY_NAMES:
            raise ConfigError(f"{latency!r} is not one of: {', '.join(LATENCY_NAMES)}", flag)
        if latency in limits:
            raise ConfigError(f"{latency} is given twice", flag)
        limits[latency] = parse_duration_s(value, flag)
    return SloTier(
        name=name,
        ttft_s=limits.get("ttft"),
        tpot_s=limits.get("tpot"),
        e2el_s=limits.get("e2el"),
        attainment=attainment,
    )


def parse_tier(text: str, attainment: float = DEFAULT_ATTAINMENT, flag: str = "--tier") -> SloTier:
    """`batch:e2el=60s@0.9`. Raises ConfigError."""
    name, colon, slo = text.partition(":")
    if not colon or not _TIER_NAME.fullmatch(name.strip()):
        raise ConfigError(f"{text!r} is not of the form NAME:LIMITS, like batch:e2el=60s@0.9", flag)
    return parse_slo(slo, attainment, name.strip(), flag)


def parse_duration_s(text: str, flag: str) -> float:
    """`500ms` or `2s`; above zero. Raises ConfigError."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{text.strip()!r} is not a duration above zero, like 500ms or 2s", flag)
    return seconds


def parse_share(text: str, flag: str) -> float:
    """A share that can be both kept and broken: 0.5 to below 1. Raises ConfigError."""
    try:
        share = float(text)
    except ValueError as error:
        raise ConfigError(f"{text.strip()!r} is not a number", flag) from error
    if not 0.5 <= share <= 0.999:
        raise ConfigError(f"must be between 0.5 and 0.999, got {text.strip()}", flag)
    return share


def _written(seconds: float) -> str:
    return f"{seconds * 1000:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"
