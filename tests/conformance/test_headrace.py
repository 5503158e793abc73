"""The command on Headrace itself: its table, its file, and how it ends."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from compose.valkey import free_port
from loadtest.conformance.suite import all_rows
from tests.conformance.faults.streams import NoDone
from tests.conformance.right_server import FAKE, NODE_MODULES, NOT_APPLICABLE, TINY, RightServer, model_for
from tests.conformance.wrong_server import Fault, RelayedAnswer, wrong_server
from tests.stack import wait_until

DONE = "streams.it-ends-with-done"
EXPOSED = "cross-origin.the-request-id-is-exposed"


class LetsNoPageIn(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        answer.headers.pop("access-control-allow-origin", None)


@dataclass(frozen=True)
class Ended:
    code: int
    table: str
    complaint: str


async def conformance(url: str, key: str, *arguments: str) -> Ended:
    """The real command, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "compose.cli", "conformance", url, "--key", key, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None, "it has ended"
    return Ended(process.returncode, output.decode(), errors.decode())


def lines_of(table: str) -> dict[str, list[str]]:
    """By what stands before the names of rows."""
    lines: dict[str, list[str]] = {}
    for line in table.splitlines():
        mark, _, rest = line.partition(" ")
        lines.setdefault(mark, []).append(rest.split()[0] if rest.split() else "")
    return lines


@pytest.mark.parametrize("model", [FAKE, TINY])
async def test_headrace_conforms(right_server: RightServer, model: str, tmp_path: Path) -> None:
    rows = [row.name for row in all_rows() if model_for(row) == model]
    file = tmp_path / "rows.json"
    chosen = [argument for name in rows for argument in ("--row", name)]
    options = ("--model", model, "--json", str(file), "--concurrency", "4")
    options += ("--node-modules", str(NODE_MODULES))
    ended = await conformance(right_server.url + "/v1", right_server.key, *options, *chosen)
    assert ended.code == 0, ended.table
    passed = [name for name in rows if name not in NOT_APPLICABLE]
    assert lines_of(ended.table)["passed"] == passed, ended.table
    num_others = len(rows) - len(passed)
    assert ended.table.endswith(f"\n{len(passed)} passed, 0 failed, {num_others} not applicable\n")
    document = json.loads(file.read_text())
    assert [row["row"] for row in document["rows"] if row["outcome"] == "passed"] == passed
    assert right_server.key not in file.read_text() + ended.table
    assert "Traceback" not in right_server.stack.log("gateway")
    wait_until(lambda: not any(right_server.stack.gauges().values()), what="the end of all work")


async def test_a_row_that_fails_is_told_and_ends_with_1(right_server: RightServer) -> None:
    async with wrong_server(right_server.url, NoDone) as url:
        rows = ("--row", DONE, "--row", "chat.ids-differ")
        ended = await conformance(url, right_server.key, "--model", FAKE, *rows)
    assert ended.code == 1
    lines = lines_of(ended.table)
    assert (lines["FAILED"], lines["passed"]) == ([DONE], ["chat.ids-differ"])
    assert ended.table.endswith("\n1 passed, 1 failed, 0 not applicable\n")


async def test_what_does_not_apply_counts_only_if_strict(right_server: RightServer) -> None:
    arguments = ("--model", FAKE, "--row", EXPOSED, "--origin", "http://elsewhere.example")
    async with wrong_server(right_server.url, LetsNoPageIn) as url:
        ended = await conformance(url, right_server.key, *arguments)
        strict = await conformance(url, right_server.key, *arguments, "--strict")
    assert (ended.code, strict.code) == (0, 1)
    assert lines_of(ended.table)["n/a"] == [EXPOSED]
    assert "pages of http://elsewhere.example are not let in" in ended.table


@pytest.mark.parametrize(
    ("key", "arguments", "words"),
    [
        ("hr-wrong", (), "--key: the server refuses the key"),
        (None, ("--row", "chat.nope"), "there is no row 'chat.nope'"),
    ],
)
async def test_what_cannot_be_run_ends_with_2(right_server, key, arguments, words) -> None:
    ended = await conformance(right_server.url, key or right_server.key, *arguments)
    assert (ended.code, ended.table) == (2, "")
    assert words in ended.complaint
    assert len(ended.complaint.splitlines()) == 1


async def test_a_server_that_is_not_there_ends_with_2() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ended = await conformance(url, "x")
    assert (ended.code, ended.table) == (2, "")
    assert f"{url} cannot be reached" in ended.complaint
    assert len(ended.complaint.splitlines()) == 1
