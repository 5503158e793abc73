"""The suite on the default model: what applies to it is pinned, lest a row steps aside unseen."""

from __future__ import annotations

import pytest

from loadtest.conformance.server import open_server
from loadtest.conformance.suite import Outcome, all_rows, run_rows
from tests.conformance.right_server import NODE_MODULES
from tests.real_stack import MODEL, RealStack

TIMEOUT_S = 120.0
NO_PAGES = "no origin is configured"
NOT_APPLICABLE = {
    "chat.thoughts-are-told-apart": "it does not think",
    **{row.name: NO_PAGES for row in all_rows() if row.group == "cross-origin"},
}


@pytest.mark.soak
async def test_the_default_model_passes_every_row_that_applies(real_stack: RealStack) -> None:
    failed, not_applicable = {}, {}
    async with open_server(
        real_stack.url, key=real_stack.key, model=MODEL, node_modules=NODE_MODULES
    ) as server:
        async for result in run_rows(server, all_rows(), timeout_s=TIMEOUT_S, concurrency=8):
            if result.outcome is Outcome.FAILED:
                failed[result.row.name] = result.reason
            elif result.outcome is Outcome.NOT_APPLICABLE:
                not_applicable[result.row.name] = result.reason
    assert failed == {}
    assert set(not_applicable) == set(NOT_APPLICABLE), not_applicable
