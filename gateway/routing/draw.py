"""What the split of an experiment was when it assigned one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.config import RouteConfig


@dataclass(frozen=True, slots=True)
class Draw:
    """Goes with the request from its assignment to the figures: the route may have other weights, other
    variants or be gone by the time it ends, and the request counts for the split that it was drawn from."""

    route: RouteConfig  # as its policy had it, with more than one variant
    weights: Sequence[float]  # of the route's variants, in their order, at that moment

    @property
    def shares(self) -> dict[str, float]:
        """By variant; empty if none had a weight. Made when asked for: few requests need it."""
        total = sum(self.weights)
        if total <= 0:
            return {}
        return {
            arm.variant: weight / total for arm, weight in zip(self.route.split, self.weights, strict=True)
        }

    @property
    def is_per_request(self) -> bool:
        """Whether each request is a subject of its own."""
        return self.route.sticky == "none"
