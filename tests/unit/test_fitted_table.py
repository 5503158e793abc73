"""Tables of commands: nothing of them is lost, in a terminal of 80 columns as in a file."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from compose.fitted_table import FittedTable
from compose.key_table import key_table
from compose.policy_table import changes_table, routes_table, tenants_table
from compose.usage_output import usage_table
from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, ApiKeySecret
from shared.usage_database import SUMS

LONG = "a-name-that-somebody-has-thought-of-in-earnest"


def shown(table: Table, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, no_color=True)
    console.print(FittedTable(table))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def keys(tenant: str) -> Table:
    record = ApiKeyRecord(
        "key_0123456789ab", TenantId(tenant), 1.8e9, 1, [ApiKeySecret("d", "hr-abcdef", 1.8e9)],
        name="the laptop of Ann, who works in the field", not_after=1.9e9,
    )  # fmt: skip
    return key_table([record, record], 1.85e9)


def usage(tenant: str) -> Table:
    row = {"tenant": tenant, "model": LONG, **dict.fromkeys(SUMS, 1_234_567_890)}
    return usage_table([row, row], list(row))


def routes(tenant: str) -> Table:
    split = [{"variant": "control", "model": LONG}, {"variant": "treated", "model": LONG}]
    entry = {"name": tenant, "origin": "admin", "hides_file": True, "config": {"split": split}}
    return routes_table([entry])


def tenants(tenant: str) -> Table:
    config = {"models": [LONG, "b"], "requests_per_minute": 600}
    return tenants_table([{"name": tenant, "origin": "file", "hides_file": False, "config": config}])


def changes(tenant: str) -> Table:
    change = {
        "time": 1.8e9, "actor": "jo@host", "action": "key.create", "object": "key_0123456789ab",
        "version_after": 1234, "change": {"tenant": tenant},
    }  # fmt: skip
    return changes_table([change])


@pytest.mark.parametrize("table_of", [keys, usage, routes, tenants, changes])
@pytest.mark.parametrize("tenant", ["acme", LONG])
def test_no_word_of_a_table_is_cut_or_broken_at_80_columns(
    table_of: Callable[[str], Table], tenant: str
) -> None:
    text = shown(table_of(tenant), 80)
    assert max(map(len, text.splitlines())) <= 80
    cells = [str(cell) for column in table_of(tenant).columns for cell in column.cells]
    for word in {word for cell in cells for word in cell.split()}:
        assert word in text, text


def test_a_word_that_is_wider_than_the_terminal_is_folded_and_whole() -> None:
    name = "x" * 128
    text = shown(keys(name), 80)
    assert name in re.sub(r"\s", "", text)
    assert "…" not in text.replace("hr-abcdef…", "")


def test_what_fits_is_one_line_a_row() -> None:
    assert len(shown(keys("acme"), 200).splitlines()) == 3


def listed(**terminal: Any) -> bytes:
    """The models of the default configuration, by the command itself."""
    environment = {**os.environ, "COLUMNS": "20"}
    command = [sys.executable, "-m", "compose.cli", "models", "list"]
    return subprocess.run(command, env=environment, check=True, timeout=60, **terminal).stdout or b""


def test_what_is_no_terminal_gets_whole_lines_whatever_its_width_is_said_to_be() -> None:
    heading, *lines = listed(stdout=subprocess.PIPE).decode().splitlines()
    assert heading.split() == ["model", "source", "engines", "dtype", "max_model_len"]
    assert [len(line.split()) for line in lines] == [5]


def test_a_narrow_terminal_gets_cards() -> None:
    ours, its = pty.openpty()
    listed(stdout=its)
    os.close(its)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")][:2] == [
        "model",
        "source",
    ]
