"""How long prompts and answers are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Lengths:
    """Fixed; uniform in [mean * (1 - range_ratio), mean * (1 + range_ratio)]; or, with a coefficient of
    variation, lognormal, as lengths of real traffic are. Never below 1, never above `highest`: what would
    be longer is cut to it.
    """

    mean: int
    range_ratio: float = 0.0
    cv: float | None = None
    highest: int | None = None

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        if self.cv:
            variance = math.log1p(self.cv**2)  # of the logarithm
            drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), size=count)
            lengths: list[int] = np.maximum(1, np.rint(drawn)).astype(int).tolist()
        else:
            low = max(1, math.floor(self.mean * (1 - self.range_ratio)))
            high = math.ceil(self.mean * (1 + self.range_ratio))
            lengths = rng.integers(low, high, size=count, endpoint=True).tolist()
        return lengths if self.highest is None else [min(length, self.highest) for length in lengths]


def share_of_prefix(prefix_len: int, num_sharing: int, input_lens: Sequence[int]) -> float:
    """Of all prompt tokens, those of a common prefix that a cache has seen before: in all but the first."""
    return prefix_len * max(0, num_sharing - 1) / max(1, sum(input_lens))
