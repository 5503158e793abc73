"""The gaps between arrivals of a law with a given mean and coefficient of variation."""

from __future__ import annotations

import numpy as np

from loadtest.knee.observations import Floats


def draw_gaps(cv: float, size: int | tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Gamma distributed with mean 1: CV 1 is a Poisson process, above it is burstier, 0 is a constant
    pace."""
    if cv == 0:
        return np.ones(size)
    shape = 1 / cv**2
    return rng.gamma(shape, 1 / shape, size)
