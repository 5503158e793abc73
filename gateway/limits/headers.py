"""What clients are told of their limits: OpenAI's headers, and Anthropic's on its routes."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

from gateway.limits.dimensions import Counts, Dimension, Kind

LIMIT_HEADER = "x-headrace-limit"  # which limit it was that refused, for machines


class Standing(NamedTuple):
    """Of one limit, after a request."""

    remaining: int
    limit: int
    reset_us: int  # until all of it remains


_UNITS = {
    Counts.REQUESTS: "requests",
    Counts.TOKENS: "tokens",
    Counts.INPUT: "input-tokens",
    Counts.OUTPUT: "output-tokens",
}


def standings(dimensions: Iterable[Dimension], figures: list[int]) -> dict[str, Standing]:
    """The tightest limit of each unit. `figures`: as reserve.lua returns them."""
    tightest: dict[str, Standing] = {}
    pairs = iter(figures)
    for dimension in dimensions:
        if dimension.kind is Kind.SLOTS:
            continue
        standing = Standing(next(pairs), dimension.limit, next(pairs))
        unit = _UNITS[dimension.counts]
        if not dimension.is_shadow and (unit not in tightest or standing < tightest[unit]):
            tightest[unit] = standing
    return tightest


def openai_headers(standing_of: dict[str, Standing]) -> dict[str, str]:
    headers = {}
    for unit, standing in standing_of.items():
        headers[f"x-ratelimit-limit-{unit}"] = str(standing.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(standing.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = duration(standing.reset_us)
    return headers


def anthropic_headers(standing_of: dict[str, Standing]) -> dict[str, str]:
    """Resets are times (RFC 3339) here, so by our own clock."""
    headers, now = {}, time.time()
    for unit, standing in standing_of.items():
        reset_at = datetime.datetime.fromtimestamp(math.ceil(now + standing.reset_us / 1e6), datetime.UTC)
        headers[f"anthropic-ratelimit-{unit}-limit"] = str(standing.limit)
        headers[f"anthropic-ratelimit-{unit}-remaining"] = str(standing.remaining)
        headers[f"anthropic-ratelimit-{unit}-reset"] = reset_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def duration(microseconds: int) -> str:
    """As OpenAI writes them: 12ms, 1.5s, 6m0s, 3h0m0s. Rounded up."""
    milliseconds = math.ceil(microseconds / 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{rest:03}".rstrip("0") if rest else ""
    if hours:
        return f"{hours}h{minutes}m{seconds}{fraction}s"
    return f"{minutes}m{seconds}{fraction}s" if minutes else f"{seconds}{fraction}s"
