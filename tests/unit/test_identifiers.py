"""Random names: of as many digits as asked for, and never twice, in a child process neither."""

from __future__ import annotations

import os
import re

import pytest

from shared.identifiers import random_hex


@pytest.mark.parametrize("num_bytes", [1, 8, 12])
def test_names_are_hex_digits_of_that_many_bytes(num_bytes: int) -> None:
    names = [random_hex(num_bytes) for _ in range(2000)]  # more than one look at the system's randomness
    assert all(re.fullmatch(f"[0-9a-f]{{{2 * num_bytes}}}", name) for name in names)
    if num_bytes > 1:
        assert len(set(names)) == len(names)


def test_a_forked_process_does_not_repeat_those_of_its_parent() -> None:
    random_hex(1)  # so that there is a stock that both could have
    receiving, sending = os.pipe()
    if (child := os.fork()) == 0:
        os.write(sending, random_hex(12).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(receiving, 24).decode() != random_hex(12)
    os.close(receiving)
    os.close(sending)
