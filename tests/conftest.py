"""What tests of several parts share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compose.die_with_parent import bound_to_this_process
from compose.valkey import EmbeddedValkey, free_port
from engine_service.openmp import bound_openmp_spinning

bound_openmp_spinning()  # as engines do: tests, too, share their cores

MAX_PORT_COLLISIONS = 5


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey for the session, with a password. Tests keep apart by their namespaces."""
    server, process = _start_valkey(tmp_path_factory.mktemp("valkey"))
    yield server.url
    process.terminate()
    process.wait(10)


def _start_valkey(directory: Path) -> tuple[EmbeddedValkey, subprocess.Popen[bytes]]:
    for _ in range(MAX_PORT_COLLISIONS):
        server = EmbeddedValkey(directory, free_port(), password="for-tests-only")
        server.write_configuration()
        process = subprocess.Popen(bound_to_this_process(server.command), stdout=subprocess.DEVNULL)
        if server.wait_until_it_answers(lambda process=process: process.poll() is None):
            return server, process
        process.kill()
        process.wait(10)
    pytest.fail("the embedded Valkey does not start")


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """The default model in transformers, float32. Loading it takes seconds: once for the session."""
    # Imported here: most tests need neither.
    from engine_service.model_source import resolve_source
    from shared.config import DEFAULT_MODEL_SOURCE
    from tests.transformers_model import transformers_model_of_gguf

    return transformers_model_of_gguf(resolve_source(DEFAULT_MODEL_SOURCE).path)
