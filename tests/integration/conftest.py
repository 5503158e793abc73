"""What several of these tests share."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.valkey import EmbeddedValkey, free_port
from tests.integration.text_stack import TextStack
from tests.shared_stacks import SharedStacks


@pytest.fixture(scope="module")
def text_stack(
    shared_stacks: SharedStacks, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> TextStack:
    """One for all tests of texts and their tokens, whose limits are looked at by tenants of their own."""
    return shared_stacks.running("text", lambda: TextStack(redis_url, tmp_path_factory.mktemp("texts")))


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Redis that the test may stop: nobody else uses it."""
    server = EmbeddedValkey(tmp_path / "valkey", free_port(), "secret")
    server.write_configuration()
    process = subprocess.Popen(server.command, stdin=subprocess.DEVNULL)
    try:
        assert server.wait_until_it_answers(lambda: process.poll() is None)
        yield server.url, process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
