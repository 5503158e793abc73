"""Counter-based randomness: a number is a function of (seed, position), not of how many were drawn before.

So a sequence gets the same tokens whatever the batch, after a preemption, and on another engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Float64Array:
    """One number in [0, 1) with 53 random bits for each pair.

    splitmix64 (Steele, Lea and Flood 2014) started at a hash of the seed, jumped to the position. The
    hash keeps neighbouring seeds from being shifted copies of one stream.
    """
    starts = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
    jumps = (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN  # modulo 2^64
    bits = _mix(starts + jumps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: UInt64Array) -> UInt64Array:
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))
