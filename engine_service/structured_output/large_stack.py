"""Threads for code that recurses deeply."""

from __future__ import annotations

import threading
from collections.abc import Callable

STACK_BYTES = 512 * 1024 * 1024  # of address space; memory only as far as it is used


def start_large_stack_thread(job: Callable[[], None], name: str) -> threading.Thread:
    """Starts a daemon thread with STACK_BYTES of stack.

    Python sets the size for all threads that start meanwhile; for others it is only address space.
    """
    previous = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=job, name=name, daemon=True)
        thread.start()
        return thread
    finally:
        threading.stack_size(previous)
