"""A/B assignment: which variant of a route a subject gets, always the same one.

It is a function of the route, its version and the subject alone: no state, the same answer on every gateway,
whatever the weights have been before and whichever variants can answer just now.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gateway.errors import invalid_request
from gateway.routing.draw import Draw
from shared.config import RouteConfig, VariantConfig
from shared.identifiers import TenantId

VARIANT_HEADER = "x-headrace-variant"
_NUM_CACHED_HASHES = 32_768  # most subjects come again: a few for each of them

SubjectSource = Literal["user", "session", "key", "none"]


@dataclass(frozen=True, slots=True)
class Asker:
    """What is known of who asks."""

    tenant: TenantId
    key_id: str
    user: str | None
    session: str | None
    wished_variant: str | None  # in the header


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom an assignment sticks to. Users and sessions are those of one tenant: two may have an "ann"."""

    source: SubjectSource
    text: str


@dataclass(frozen=True, slots=True)
class Assignment:
    subject: Subject
    assigned: VariantConfig  # by the split
    variant: VariantConfig  # that is to answer: another one, if `is_overridden`
    is_overridden: bool = False
    draw: Draw | None = None  # None: it is no part of an experiment

    @property
    def told_source(self) -> str:
        """For the header x-headrace-subject."""
        return "override" if self.is_overridden else self.subject.source


class Assigner:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: unix time, by which ramps go."""
        self._clock = clock

    def assign(self, route: RouteConfig, asker: Asker) -> Assignment:
        """Raises ApiError 400 for a variant that the route does not have."""
        subject = subject_of(route, asker)
        weights = weights_of(route.split, self._clock())
        assigned = assign(route.name, route.version, route.split, weights, subject.text)
        wished = self._override(route, asker)
        if wished is None:
            draw = Draw(route, weights) if len(route.split) > 1 else None
            return Assignment(subject, assigned, assigned, draw=draw)
        return Assignment(subject, assigned, wished, is_overridden=True)

    def _override(self, route: RouteConfig, asker: Asker) -> VariantConfig | None:
        if route.allow_variant_header and asker.wished_variant is not None:
            variant = route.variant(asker.wished_variant)
            if variant is None:
                known = ", ".join(arm.variant for arm in route.split)
                wished = repr(asker.wished_variant[:128])
                message = f"The model {route.name!r} has no variant {wished}; it has: {known}."
                raise invalid_request(message, VARIANT_HEADER, "invalid_value")
            return variant
        for override in route.overrides:
            if override.tenant == asker.tenant:
                return route.variant(override.variant)
        return None


def subject_of(route: RouteConfig, asker: Asker) -> Subject:
    """Without the wanted name the API key stands in for it."""
    match route.sticky:
        case "user" if asker.user:
            return Subject("user", f"user:{asker.tenant}:{asker.user}")
        case "session" if asker.session:
            return Subject("session", f"session:{asker.tenant}:{asker.session}")
        case "none":
            return Subject("none", f"request:{secrets.token_hex(8)}")
        case _:
            return Subject("key", f"key:{asker.key_id}")


def subject_hash(route_name: str, version: int, subject: str) -> int:
    """Stands for a subject in figures, which know nobody by name: 64 bits, another in each experiment."""
    return _hash(route_name, str(version), subject)


def weights_of(split: Sequence[VariantConfig], now: float) -> list[float]:
    return [variant.weight_at(now) for variant in split]


def assign(
    route_name: str, version: int, split: Sequence[VariantConfig], weights: Sequence[float], subject: str
) -> VariantConfig:
    """Weighted rendezvous hashing: the variant with the highest score, -weight / ln(u).

    `u` in (0, 1) is a hash of (route, version, variant, subject). A variant's share is its part of the sum of
    weights; when weights change, only the share that has to move does (Schindelhauer & Schomaker 2005).
    """
    if len(split) == 1:  # most routes
        return split[0]
    best, best_score = split[0], -1.0
    for variant, weight in zip(split, weights, strict=True):
        if weight <= 0:
            continue
        score = -weight / math.log(uniform(route_name, str(version), variant.variant, subject))
        if score > best_score:
            best, best_score = variant, score
    return best


def uniform(*parts: str) -> float:
    """In (0, 1), by the parts alone."""
    return (_hash(*parts) + 0.5) / 2**64


@lru_cache(_NUM_CACHED_HASHES)
def _hash(*parts: str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)  # lengths: ("ab", "c") is not ("a", "bc")
    return int.from_bytes(digest.digest(), "little")
