"""What the tests of official clients share: they all talk to the session's one stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.real_stack import RealStack
from tests.stack import wait_until

LongWork = Callable[[], AbstractContextManager[None]]
LONG = 1500  # tokens: seconds of work, of which those that give up leave nearly all undone


@pytest.fixture
def given_up_early(real_stack: RealStack) -> LongWork:
    """For a block that asks for `LONG` tokens and then leaves: the engine, too, has to stop soon."""

    @contextmanager
    def check() -> Iterator[None]:
        before = real_stack.count("vllm:generation_tokens_total")
        yield
        wait_until(lambda: not any(real_stack.gauges().values()), what="an idle stack")
        assert real_stack.count("vllm:generation_tokens_total") - before < LONG / 2

    return check
