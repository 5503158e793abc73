"""`headrace keys`: API keys of tenants. A key is shown once, when it is made; only an HMAC of it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compose.commands.options import DEFAULT_RUN_DIR, ConfigOption, RunDirOption

if TYPE_CHECKING:
    from compose.key_desk import KeyDesk

app = typer.Typer(help="API keys of tenants.", no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="As `headrace keys list` shows it.")]


@app.command()
def create(
    tenant: Annotated[str, typer.Option("--tenant", help="Who pays for its requests.")] = "default",
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Make a key and print it. It cannot be shown again."""
    with _desk(run_dir, config) as desk:
        made = desk.create(tenant)
    typer.echo(f"{made.record.key_id} of tenant {tenant}", err=True)
    typer.echo(made.secret)  # alone on stdout, for KEY=$(headrace keys create)


@app.command("list")
def list_keys(config: ConfigOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Show the keys that are valid now."""
    from datetime import datetime  # local: see compose/cli.py

    from rich.console import Console
    from rich.table import Table

    with _desk(run_dir, config) as desk:
        records = desk.list()
    table = Table("key id", "tenant", "begins with", "created", box=None)
    for record in records:
        created = datetime.fromtimestamp(record.created_at).isoformat(sep=" ", timespec="seconds")
        table.add_row(record.key_id, record.tenant, f"{record.display_prefix}…", created)
    Console().print(table)


@app.command()
def rotate(
    key_id: KeyId,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Leave the old one valid; revoke it when clients have changed.")
    ] = False,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Make a new key for the tenant of an old one, print it, and revoke the old one."""
    with _desk(run_dir, config) as desk:
        made = desk.create(desk.tenant_of(key_id))
        typer.echo(f"{made.record.key_id} of tenant {made.record.tenant}, after {key_id}", err=True)
        typer.echo(made.secret)
        if not keep_old:  # only after the new one has been shown
            desk.revoke(key_id)


@app.command()
def revoke(key_id: KeyId, config: ConfigOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Make a key invalid, on every gateway, within seconds."""
    with _desk(run_dir, config) as desk:
        desk.revoke(key_id)
    typer.echo(f"{key_id} is revoked", err=True)


@contextmanager
def _desk(run_dir: Path, config: Path | None) -> Iterator[KeyDesk]:
    import redis  # local: see compose/cli.py

    from compose.key_desk import KeyDesk
    from compose.stack_access import key_pepper, redis_access
    from shared.errors import ConfigError

    access = redis_access(run_dir, config)
    client = access.connect()
    try:
        yield KeyDesk(client, access.keys, key_pepper(run_dir))
    except redis.RedisError as error:
        raise ConfigError(f"Redis does not answer: {error}", "HEADRACE_REDIS_URL") from error
    finally:
        client.close()
