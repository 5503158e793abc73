"""A stack that may be sent anything, and goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.stack import Stack, wait_until


@contextlib.contextmanager
def unharmed(stack: Stack) -> Iterator[None]:
    """Checks at the end that the same processes run, hold nothing, and have logged no traceback."""
    before = _epochs_of(stack)
    yield
    wait_until(lambda: not any(stack.gauges().values()), what="an idle stack")
    assert _epochs_of(stack) == before
    for name, process in stack.processes.items():
        assert process.poll() is None
        assert "Traceback" not in stack.log(name), stack.log(name)


def _epochs_of(stack: Stack) -> set[str]:
    """One for each life of an engine."""
    return {engine["epoch"] for engine in stack.admin_status()["engines"]}
