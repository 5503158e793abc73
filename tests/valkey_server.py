"""A Valkey of one's own, for tests and benchmarks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compose.die_with_parent import bound_to_this_process
from compose.valkey import EmbeddedValkey, free_port

MAX_PORT_COLLISIONS = 5


@contextmanager
def running_valkey(directory: Path) -> Iterator[str]:
    """Its URL; it has a password. Raises RuntimeError if it does not start."""
    server, process = start_valkey(directory)
    try:
        yield server.url
    finally:
        process.terminate()
        process.wait(10)


def start_valkey(directory: Path) -> tuple[EmbeddedValkey, subprocess.Popen[bytes]]:
    """For a test that ends it itself. Raises RuntimeError if it does not start."""
    for _ in range(MAX_PORT_COLLISIONS):
        server = EmbeddedValkey(directory, free_port(), password="for-tests-only")
        server.write_configuration()
        process = subprocess.Popen(bound_to_this_process(server.command), stdout=subprocess.DEVNULL)
        if server.wait_until_it_answers(lambda process=process: process.poll() is None):
            return server, process
        process.kill()
        process.wait(10)
    raise RuntimeError("the embedded Valkey does not start")
