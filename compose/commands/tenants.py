"""`headrace tenants`: who may ask for what, and how much of it, while the stack runs."""

from __future__ import annotations

from typing import Annotated

import typer

from compose.commands.options import DEFAULT_RUN_DIR, RunDirOption, UrlOption
from compose.commands.policy import (
    AssignmentArgument,
    FileOption,
    JsonOption,
    delete_entry,
    print_table,
    set_entry,
    show_entry,
)

app = typer.Typer(help="Tenants: what they may use, and how much of it.", no_args_is_help=True)
Tenant = Annotated[str, typer.Argument(metavar="TENANT")]


@app.command("list")
def list_tenants(
    as_json: JsonOption = False, url: UrlOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR
) -> None:
    """Show the tenants in force, and whether the file or the admin API has set them."""
    print_table("tenants", as_json, url, run_dir)


@app.command()
def show(name: Tenant, url: UrlOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Show one tenant as JSON."""
    show_entry("tenants", name, url, run_dir)


@app.command("set")
def set_tenant(
    name: Tenant,
    assignments: AssignmentArgument = None,
    file: FileOption = None,
    url: UrlOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Change a tenant, or make one: `headrace tenants set acme requests_per_minute=600`.

    It is in force on all gateways within a second, and stays so whatever the file says of this tenant.
    """
    set_entry("tenants", name, assignments or [], [], file, url, run_dir)


@app.command()
def delete(name: Tenant, url: UrlOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Take back what was set. A tenant that the file has is as the file says, then."""
    delete_entry("tenants", name, url, run_dir)
