"""OpenAI's JavaScript client against the default model: a test here for each case in `js/`."""

from __future__ import annotations

import pytest

from tests.clients import node
from tests.real_stack import ABSENT, EMBEDDER, HASTY, MODEL, RealStack


@pytest.fixture(scope="module")
def outcomes(real_stack: RealStack, request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Of the cases that were chosen, all in one run."""
    chosen = [item.callspec.params["case"] for item in request.session.items if item.module is request.module]
    environment = {
        "HEADRACE_URL": real_stack.url,
        "HEADRACE_KEY": real_stack.key,
        "HEADRACE_HASTY_KEY": real_stack.key_of(HASTY),
        "HEADRACE_MODEL": MODEL,
        "HEADRACE_EMBEDDER": EMBEDDER,
        "HEADRACE_ABSENT": ABSENT,
    }
    return node.run(chosen, environment)


@pytest.mark.parametrize("case", node.cases())
def test_the_javascript_client(case, outcomes):
    assert case in outcomes, "it did not run"
    assert outcomes[case] is None, outcomes[case]
