"""The server that is right."""

from __future__ import annotations

import pytest

from tests.conformance.right_server import RightServer, running_right_server
from tests.shared_stacks import SharedStacks


@pytest.fixture(scope="module")
def right_server(
    shared_stacks: SharedStacks, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> RightServer:
    return shared_stacks.running(
        "right", lambda: running_right_server(redis_url, tmp_path_factory.mktemp("right"))
    )
