"""What the tests of the whole stack share."""

from __future__ import annotations

import openai
import pytest

from tests.real_stack import RealStack


@pytest.fixture(scope="module")
def client(real_stack: RealStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=real_stack.url + "/v1", api_key=real_stack.key, max_retries=0, timeout=120)
