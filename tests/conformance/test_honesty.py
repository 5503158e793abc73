"""The suite's own honesty: of a server with one planted fault it fails exactly the rows that are about it.

In every run each fault meets the rows that it must fail and one other; in the long runs fifty others, which
are drawn anew each time.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from types import ModuleType

import pytest

from loadtest.conformance.row import Row
from loadtest.conformance.suite import Outcome, Result, all_rows
from tests.conformance.faults import FAULTS, MODULES
from tests.conformance.faults.planted import Planted
from tests.conformance.right_server import NOT_APPLICABLE, RightServer
from tests.conformance.wrong_server import Fault, wrong_server

TIMEOUT_S = 30.0
TIMEOUT_OF_WHAT_HANGS_S = 1.5
NUM_SERVERS = 4  # at a time
NUM_OTHERS, NUM_OTHERS_OF_LONG_RUNS = 1, 50
NOTHING_WRONG = Planted("nothing is wrong", Fault, frozenset())  # the relay by itself

OF_A_CLIENT = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # at what is wrong
SHOWN_BY_NONE: dict[str, str] = {}  # rows that no fault makes fail, and why


async def run(
    right_server: RightServer, fault: Planted, rows: Sequence[Row], timeout_s: float
) -> dict[str, Result]:
    async with wrong_server(right_server.url, fault.make) as url:
        results = right_server.results(url, rows, timeout_s=timeout_s, concurrency=8)
        return {result.row.name: result async for result in results}


def reasons(results: dict[str, Result], outcome: Outcome) -> dict[str, str]:
    return {name: result.reason for name, result in results.items() if result.outcome is outcome}


def is_of_a_client(row: Row) -> bool:
    """Those start an official client, which takes long and sees a good part of all faults."""
    return row.group.endswith("-client")


def rows_for(fault: Planted, num_others: int, seed: str) -> list[Row]:
    """Those that it must fail, and others of which none of it may be seen."""
    its = [row for row in all_rows() if row.name in fault.rows]
    others = [row for row in all_rows() if row.name not in fault.rows and not is_of_a_client(row)]
    return its + random.Random(seed + fault.name).sample(others, 0 if fault.spoils else num_others)


def judged(fault: Planted, results: dict[str, Result]) -> dict[str, str]:
    """Rows that do not do what this fault should make them do, and what they do instead."""
    wrong = {}
    for name, result in results.items():
        should_fail = name in fault.rows
        has_failed = result.outcome is Outcome.FAILED
        took_too_long = any(words in result.reason for words in ("not over within", "still open after"))
        for_the_right_reason = not has_failed or took_too_long == fault.hangs
        if has_failed != should_fail or not for_the_right_reason:
            wrong[f"{fault.name}: {name}"] = f"{result.outcome} {result.reason}"
    return wrong


@OF_A_CLIENT
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
async def test_a_fault_fails_its_rows(right_server: RightServer, module: ModuleType) -> None:
    turns = asyncio.Semaphore(NUM_SERVERS)

    async def check(fault: Planted) -> dict[str, str]:
        rows = rows_for(fault, 0 if fault.hangs else NUM_OTHERS, "")  # what hangs has a short time limit
        async with turns:
            timeout_s = TIMEOUT_OF_WHAT_HANGS_S if fault.hangs else TIMEOUT_S
            return judged(fault, await run(right_server, fault, rows, timeout_s))

    wrong = await asyncio.gather(*map(check, module.FAULTS))
    assert {name: why for each in wrong for name, why in each.items()} == {}


@pytest.mark.soak
@pytest.mark.parametrize("of_clients", [False, True])
async def test_the_relay_by_itself_fails_no_row(right_server: RightServer, of_clients: bool) -> None:
    rows = [row for row in all_rows() if is_of_a_client(row) == of_clients]
    results = await run(right_server, NOTHING_WRONG, rows, TIMEOUT_S)
    assert reasons(results, Outcome.FAILED) == {}
    expected = {row.name for row in rows} & set(NOT_APPLICABLE)
    assert set(reasons(results, Outcome.NOT_APPLICABLE)) == expected


@pytest.mark.soak
@OF_A_CLIENT
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if not fault.spoils], ids=lambda fault: fault.name
)
async def test_a_fault_fails_no_other_row(right_server: RightServer, fault: Planted) -> None:
    seed = secrets.token_hex(4)
    rows = rows_for(fault, NUM_OTHERS_OF_LONG_RUNS, seed)
    assert judged(fault, await run(right_server, fault, rows, TIMEOUT_S)) == {}, f"seed {seed}"


def test_every_row_has_a_fault_that_it_finds() -> None:
    names = {row.name for row in all_rows()}
    shown = {name for fault in FAULTS for name in fault.rows}
    assert names - shown == set(SHOWN_BY_NONE)
    assert shown <= names


def test_rows_and_faults_have_names_of_their_own() -> None:
    for names in ([row.name for row in all_rows()], [fault.name for fault in FAULTS]):
        assert len(set(names)) == len(names)
