"""`headrace usage`: what tenants have asked for, and what it came to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from compose.commands.options import DEFAULT_RUN_DIR, ConfigOption, RunDirOption, UrlOption
from compose.commands.policy import EXIT_FAILED

if TYPE_CHECKING:
    from shared.usage_database import UsageFilter
    from shared.usage_source import FoundUsage, UsageSource


def usage(
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="30m, 24h, 7d, or a date such as 2026-11-01 (UTC)."),
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Not included.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this one's requests.")] = None,
    route: Annotated[str | None, typer.Option("--route", help="Only what was asked of it.")] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY_ID", help="Only by this key.")] = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            help="What to sum by, with commas: tenant, key, route, variant, model, engine, operation, "
            "outcome, day, hour; empty for one sum.",
        ),
    ] = "tenant,model",
    rows: Annotated[bool, typer.Option("--rows", help="Single requests instead of sums.")] = False,
    with_shadow: Annotated[
        bool, typer.Option("--with-shadow", help="Also copies for shadow variants, which nobody pays for.")
    ] = False,
    output_format: Annotated[
        Literal["table", "csv", "json", "parquet"], typer.Option("--format", help="How to print it.")
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Instead of the terminal.")
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Sum requests and tokens from the configured SQLite file, else from what Redis still has."""
    import time  # local: see compose/cli.py

    from compose.fitted_table import FittedTable, output_console
    from compose.moments import past_moment
    from compose.usage_output import as_csv, as_json, usage_table, write_parquet
    from shared.errors import ConfigError
    from shared.usage_database import GROUPINGS, SUMS, UsageFilter

    now = time.time()
    groups = list(dict.fromkeys(name.strip() for name in by.split(",") if name.strip()))
    for name in groups:
        if name not in GROUPINGS:
            raise ConfigError(f"--by: {name!r} is none of {', '.join(GROUPINGS)}", "by")
    if output_format == "parquet" and output is None:
        raise ConfigError("parquet needs --output FILE", "output")
    wanted = UsageFilter(
        since=None if since is None else past_moment(since, "--since", now),
        until=None if until is None else past_moment(until, "--until", now),
        tenant=tenant,
        route=route,
        key=key,
        with_shadow=with_shadow,
    )
    if url is not None:
        if rows:
            raise ConfigError(
                "the admin API tells sums only: --rows needs the stack's Redis or file", "--rows"
            )
        found = _asked(url, run_dir, wanted, groups)
    else:
        found = _read(wanted, None if rows else groups, config, run_dir)
    columns = list(found.rows[0]) if found.rows else [*groups, *SUMS]
    if found.incomplete_until is not None:
        _warn_of_gap(found.incomplete_until)
    if found.num_left_out:
        typer.echo(f"headrace: {found.num_left_out} rows in Redis cannot be read and are left out", err=True)
    match output_format:
        case "parquet":
            assert output is not None, "checked above"
            write_parquet(found.rows, columns, output)
        case "table" if output is None:
            output_console().print(FittedTable(usage_table(found.rows, columns)))
        case "csv" | "table":
            _write(as_csv(found.rows, columns), output)
        case "json":
            _write(as_json(found.rows), output)


def _asked(url: str, run_dir: Path, wanted: UsageFilter, groups: list[str]) -> FoundUsage:
    """Of the admin API."""
    import math  # local: see compose/cli.py
    from urllib.parse import urlencode

    from compose.gateway_client import ANSWER_TIMEOUT_S, GatewayClient, GatewayError
    from compose.stack_access import admin_api_access
    from shared.usage_source import FoundUsage

    given = {
        "since": None if wanted.since is None else math.floor(wanted.since),
        "until": None if wanted.until is None else math.floor(wanted.until),
        "tenant": wanted.tenant,
        "route": wanted.route,
        "key": wanted.key,
        "with_shadow": str(wanted.with_shadow).lower(),
        "by": ",".join(groups),
    }
    query = urlencode({name: value for name, value in given.items() if value is not None})
    access = admin_api_access(run_dir, url)
    try:
        document, _ = GatewayClient(access.url, access.token).ask(
            "GET", f"/admin/usage?{query}", timeout_s=ANSWER_TIMEOUT_S
        )
    except GatewayError as error:
        typer.echo(f"headrace: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    return FoundUsage(document["data"], document["incomplete_until"], document["num_left_out"])


def _read(wanted: UsageFilter, groups: list[str] | None, config: Path | None, run_dir: Path) -> FoundUsage:
    """From where rows are kept. `groups`: None: the rows themselves."""
    import sqlite3  # local: see compose/cli.py

    from shared.errors import ConfigError
    from shared.usage_source import FoundUsage

    source = _source(wanted, config, run_dir)
    try:
        database = source.database
        rows = list(database.rows(wanted)) if groups is None else database.sums(wanted, groups)
    except sqlite3.Error as error:
        raise ConfigError(
            f"cannot read usage rows from {source.name}: {error}; is it a file that gateways write?",
            "usage.sqlite",
        ) from error
    return FoundUsage(rows, source.incomplete_until, source.num_left_out)


def _source(wanted: UsageFilter, config: Path | None, run_dir: Path) -> UsageSource:
    import redis  # local: see compose/cli.py

    from compose.stack_access import redis_access, stack_config
    from shared.errors import ConfigError
    from shared.usage_source import file_source, stream_source

    if (source := file_source(stack_config(run_dir, config).usage.sqlite)) is not None:
        return source
    access = redis_access(run_dir, config)
    client = access.connect()
    try:
        return stream_source(client, access.keys, wanted)
    except redis.RedisError as error:
        raise ConfigError(f"Redis does not answer: {error}", "HEADRACE_REDIS_URL") from error
    finally:
        client.close()


def _warn_of_gap(incomplete_until: float) -> None:
    from compose.moments import shown  # local: see compose/cli.py

    typer.echo(
        f"headrace: Redis has rows only from {shown(incomplete_until)} on; older ones were dropped "
        "(see max_rows and sqlite in [usage])",
        err=True,
    )


def _write(content: bytes, output: Path | None) -> None:
    from shared.errors import ConfigError  # local: see compose/cli.py

    if output is None:
        typer.echo(content.decode(), nl=False)
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}", "output") from error
