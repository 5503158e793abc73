"""The suite's own honesty: of a server with one planted fault it fails exactly the rows that are about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.conformance.server import open_server
from loadtest.conformance.suite import Outcome, all_rows, run_rows
from tests.conformance.faults import (
    FAULTS,
    AnthropicErrorsInOpenAIsShape,
    Base64OfDoubles,
    BombIs400,
    BreaksOffLongStreams,
    DetailInsteadOfError,
    EchoesAnyRequestId,
    ForgetsUnknownFields,
    NewIdForEachChunk,
    NoSequenceNumbers,
    SplitCharacters,
    StopsAtAnyDone,
    UsageForAll,
)
from tests.conformance.wrong_server import Fault, wrong_server
from tests.stack import Stack, fake_model

ROW_TIMEOUT_S = 8.0  # that a fault which hangs costs; the slowest row takes one


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, {"models": [fake_model(), fake_model("vectors", runner="pooling")]}) as stack:
        yield stack


# A second and a half each: a dozen of different kinds in every run, the others with the long runs.
IN_EVERY_RUN = (
    Fault,  # none at all
    StopsAtAnyDone,
    UsageForAll,
    NewIdForEachChunk,
    SplitCharacters,
    DetailInsteadOfError,
    EchoesAnyRequestId,
    ForgetsUnknownFields,
    Base64OfDoubles,
    NoSequenceNumbers,
    AnthropicErrorsInOpenAIsShape,
    BombIs400,
    BreaksOffLongStreams,
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.__name__, marks=() if fault in IN_EVERY_RUN else pytest.mark.soak)
        for fault in FAULTS
    ],
)
async def test_a_fault_fails_its_rows_and_no_other(stack: Stack, fault: type[Fault]) -> None:
    failed: dict[str, str] = {}
    not_applicable: set[str] = set()
    async with wrong_server(stack.url, fault) as url, open_server(url, key=stack.key(), model=None) as server:
        async for result in run_rows(server, all_rows(), timeout_s=ROW_TIMEOUT_S, concurrency=8):
            if result.outcome is Outcome.FAILED:
                failed[result.row.name] = result.reason
            elif result.outcome is Outcome.NOT_APPLICABLE:
                not_applicable.add(result.row.name)
    for name, reason in failed.items():
        print(f"{name}: {reason}")
    if FAULTS[fault] and FAULTS[fault] <= not_applicable:
        pytest.skip("the server behind the relay has nothing that this fault could break")
    assert set(failed) == FAULTS[fault]


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)
