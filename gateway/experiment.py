"""A/B assignment: which variant of a route a subject gets, always the same one."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence

from shared.config import RouteConfig, VariantConfig


def subject_of(route: RouteConfig, *, user: str | None, session: str | None, key_id: str) -> str:
    """Whom the assignment sticks to. Without the wanted name the API key stands in for it."""
    match route.sticky:
        case "user":
            return f"user:{user}" if user else f"key:{key_id}"
        case "session":
            return f"session:{session}" if session else f"key:{key_id}"
        case "key":
            return f"key:{key_id}"
        case "none":
            return f"request:{secrets.token_hex(8)}"


def subject_hash(route_name: str, version: int, subject: str) -> int:
    """Stands for a subject in figures, which know nobody by name: 64 bits, another in each experiment."""
    return _hash(route_name, str(version), subject)


def assign(route_name: str, version: int, split: Sequence[VariantConfig], subject: str) -> VariantConfig:
    """Weighted rendezvous hashing: the variant with the highest score, -weight / ln(u).

    `u` in (0, 1) is a hash of (route, version, variant, subject). A variant's share is its part of the sum of
    weights; when weights change, only the share that has to move does (Schindelhauer & Schomaker 2005).
    """
    best, best_score = split[0], -1.0
    for variant in split:
        if variant.weight <= 0:
            continue
        score = -variant.weight / math.log(_uniform(route_name, str(version), variant.variant, subject))
        if score > best_score:
            best, best_score = variant, score
    return best


def _uniform(*parts: str) -> float:
    return (_hash(*parts) + 0.5) / 2**64


def _hash(*parts: str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)  # lengths: ("ab", "c") is not ("a", "bc")
    return int.from_bytes(digest.digest(), "little")
