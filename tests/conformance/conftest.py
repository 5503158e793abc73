"""The server that is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.right_server import RightServer, running_right_server


@pytest.fixture(scope="session")
def right_server(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RightServer]:
    with running_right_server(redis_url, tmp_path_factory.mktemp("right")) as server:
        yield server
