"""How a service logs: lines on stderr, for whoever runs it to collect."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Call once, at the start of a service's process. HTTP access lines are not logged."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
    )
