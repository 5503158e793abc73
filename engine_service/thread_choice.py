"""How many threads compute steps: more is not always faster, so it is measured when an engine starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_NUM_ROUNDS = 3
_WORTH_IT = 0.9  # of the time with more threads: a smaller gain is noise


def thread_candidates(most: int) -> list[int]:
    """All, a half and a quarter of them, the most first. Up to three are not worth a measurement."""
    return [most] if most < 4 else [most, most // 2, most // 4]


def fastest(candidates: Sequence[int], time_step: Callable[[int], float]) -> int:
    """The candidate with the shortest step; an earlier one unless a later one is clearly faster.

    `time_step(num_threads)` makes a step and returns what it took. The candidates take turns, since a
    machine's speed changes, and the best of each counts.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(_NUM_ROUNDS):
        for candidate in candidates:
            best[candidate] = min(best[candidate], time_step(candidate))
    chosen = candidates[0]
    for candidate in candidates[1:]:
        if best[candidate] < _WORTH_IT * best[chosen]:
            chosen = candidate
    return chosen
