"""What tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_service.openmp import bound_openmp_spinning
from tests.real_stack import RealStack, running_real_stack
from tests.shared_stacks import SharedStacks
from tests.valkey_server import running_valkey

bound_openmp_spinning()  # as engines do: tests, too, share their cores


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, where that is asked for
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.file_scheduling import FileScheduling

    return FileScheduling(config, log)


@pytest.hookimpl
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups in one piece, and first that of the stack that most tests share: who runs it would otherwise
    be the last to end.
    """
    from tests.file_scheduling import REAL_STACK, group_of

    groups = dict.fromkeys([REAL_STACK, *(group_of(item.nodeid) for item in items)])
    places = {group: place for place, group in enumerate(groups)}
    items.sort(key=lambda item: places[group_of(item.nodeid)])


_SHARED_STACKS = pytest.StashKey[SharedStacks]()


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SHARED_STACKS] = SharedStacks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    from tests.file_scheduling import group_of

    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
            item.config.stash[_SHARED_STACKS].end_all()


@pytest.fixture(scope="session")
def shared_stacks(pytestconfig: pytest.Config, redis_url: str) -> Iterator[SharedStacks]:
    """Ends before their Redis, which it depends on."""
    stacks = pytestconfig.stash[_SHARED_STACKS]
    yield stacks
    stacks.end_all()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey for the session. Tests keep apart by their namespaces."""
    with running_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="module")
def real_stack(shared_stacks: SharedStacks, tmp_path_factory: pytest.TempPathFactory) -> RealStack:
    """Tests that take it share one `headrace up`."""
    return shared_stacks.running("real", lambda: running_real_stack(tmp_path_factory.mktemp("real")))


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """The default model in transformers, float32. Loading it takes seconds: once for the session."""
    # Imported here: most tests need neither.
    from engine_service.model_source import resolve_source
    from shared.config import DEFAULT_MODEL_SOURCE
    from tests.transformers_model import transformers_model_of_gguf

    return transformers_model_of_gguf(resolve_source(DEFAULT_MODEL_SOURCE).path)
