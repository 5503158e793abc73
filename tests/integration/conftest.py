"""What several of these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.text_stack import TextStack


@pytest.fixture(scope="session")
def text_stack(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextStack]:
    """One for all tests of texts and their tokens, whose limits are looked at by tenants of their own."""
    with TextStack(redis_url, tmp_path_factory.mktemp("texts")) as stack:
        yield stack
