"""Where latency turns up, read off a curve without any promise: Kneedle (Satopaa et al., 2011) on a
logarithm.

The point of the curve of log p95 TTFT over the rate that lies farthest below the chord between its ends,
within a fixed range of 0.3 to 1 times saturation: with another range the point would move. It is a shape,
never a capacity.
"""

from __future__ import annotations

import numpy as np

from loadtest.knee.observations import Floats

RANGE = (0.3, 1.0)  # of the saturation rate
DEFINITION = (
    "largest distance below the chord of log p95 TTFT (from due) over the rate, between 0.3 and 1.0 of "
    "saturation; a shape, not a capacity"
)


def shape_knee(rates: Floats, p95_ttft_s: Floats) -> float | None:
    """None if there are fewer than three finite points, or the curve does not bend upwards."""
    order = np.argsort(rates)
    rates, p95_ttft_s = rates[order], p95_ttft_s[order]
    known = np.isfinite(p95_ttft_s) & (p95_ttft_s > 0)
    rates, height = rates[known], np.log(p95_ttft_s[known])
    if len(rates) < 3 or rates[-1] <= rates[0] or height[-1] <= height[0]:
        return None
    across = (rates - rates[0]) / (rates[-1] - rates[0])
    up = (height - height[0]) / (height[-1] - height[0])
    below = across - up
    at = int(np.argmax(below))
    if below[at] <= 0 or at in (0, len(rates) - 1):
        return None
    return _vertex(rates[at - 1 : at + 2], below[at - 1 : at + 2])


def _vertex(x: Floats, y: Floats) -> float:
    """Of the parabola through three points, kept between the outer two."""
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curvature = (right - left) / (x[2] - x[0])
    if curvature >= 0:
        return float(x[1])
    vertex = (x[0] + x[1]) / 2 - left / (2 * curvature)
    return float(np.clip(vertex, x[0], x[2]))
