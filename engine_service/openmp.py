"""How threads wait for work between parallel loops of torch and of our C++ kernels."""

from __future__ import annotations

import os

# Iterations, together about 0.1 ms. GNU OpenMP's own value is 300,000.
_SPIN_COUNT = "10000"


def bound_openmp_spinning() -> None:
    """Makes idle threads sleep soon. Must be called before torch is imported: its OpenMP reads this once.

    A spinning thread holds the core that the thread it waits for may need. Measured on 2 cores with
    the 135M default model. Quiet machine, decode of one sequence: 30 ms with this and with the default,
    42 ms when threads sleep at once (passive). Busy neighbours (load average 3.5), 40 steps of 3
    sequences, taken in turns: 3.9 and 4.1 s with this, 40.1 and 37.4 s with the default. What the user
    has set is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
