"""What tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_service.openmp import bound_openmp_spinning
from tests.real_stack import RealStack, running_real_stack
from tests.valkey_server import running_valkey

bound_openmp_spinning()  # as engines do: tests, too, share their cores


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, where that is asked for
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.file_scheduling import FileScheduling

    return FileScheduling(config, log)


@pytest.hookimpl
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The stack that most tests share first: who runs them would otherwise be the last to end."""
    from tests.file_scheduling import REAL_STACK, group_of

    items.sort(key=lambda item: group_of(item.nodeid) != REAL_STACK)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey for the session. Tests keep apart by their namespaces."""
    with running_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def real_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """Tests that take it share one `headrace up`."""
    with running_real_stack(tmp_path_factory.mktemp("real")) as stack:
        yield stack


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """The default model in transformers, float32. Loading it takes seconds: once for the session."""
    # Imported here: most tests need neither.
    from engine_service.model_source import resolve_source
    from shared.config import DEFAULT_MODEL_SOURCE
    from tests.transformers_model import transformers_model_of_gguf

    return transformers_model_of_gguf(resolve_source(DEFAULT_MODEL_SOURCE).path)
