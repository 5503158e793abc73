"""Who answers in the place of a variant that fails before the first byte of the answer."""

from __future__ import annotations

from collections import deque

from shared.config import RouteConfig, VariantConfig

FALLBACK_HEADER = "x-headrace-fallback"


class FallbackChain:
    """The variants that may answer one request, each of them once: the one that is to, then those that the
    route names as `fallback`."""

    def __init__(self, route: RouteConfig, first: VariantConfig) -> None:
        others = (route.variant(name) for name in route.fallback if name != first.variant)
        self._left = deque([first, *(other for other in others if other is not None)])
        self._has_others = len(self._left) > 1
        self.failed: list[str] = []  # in order

    def next(self) -> VariantConfig | None:
        return self._left.popleft() if self._left else None

    @property
    def headers(self) -> dict[str, str]:
        """Which variants have failed, where there were others to try."""
        return {FALLBACK_HEADER: ",".join(self.failed)} if self.failed and self._has_others else {}
