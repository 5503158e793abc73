"""`headrace audit`: who changed tenants, routes and keys, and when."""

from __future__ import annotations

from typing import Annotated

import typer

from compose.commands.options import DEFAULT_RUN_DIR, RunDirOption, UrlOption
from compose.commands.policy import JsonOption, open_desk, print_json


def audit(
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="30m, 24h, 7d, or a date such as 2026-11-01.")
    ] = "30d",
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="So many, the latest ones.")] = 100,
    as_json: JsonOption = False,
    url: UrlOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Show the changes of tenants, routes and keys, the latest last."""
    import time  # local: see compose/cli.py

    from compose.fitted_table import FittedTable, output_console
    from compose.moments import past_moment
    from compose.policy_table import MAX_CHANGE_CHARACTERS, changes_table

    begin = past_moment(since, "--since", time.time())
    with open_desk(url, run_dir) as desk:
        changes = desk.changes(begin, limit)
    if as_json:
        print_json(changes)
    else:
        console = output_console()
        limit_of_change = MAX_CHANGE_CHARACTERS if console.is_terminal else None
        console.print(FittedTable(changes_table(changes, limit_of_change)))
