"""`headrace routes`: how the names that clients send as `model` are split, while the stack runs."""

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

app = typer.Typer(help="Routes: what clients send as `model`, and its variants.", no_args_is_help=True)
Route = Annotated[str, typer.Argument(metavar="ROUTE")]


@app.command("list")
def list_routes(
    as_json: JsonOption = False, url: UrlOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR
) -> None:
    """Show the routes in force, and whether the file or the admin API has set them."""
    print_table("routes", as_json, url, run_dir)


@app.command()
def show(name: Route, url: UrlOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Show one route as JSON."""
    show_entry("routes", name, url, run_dir)


@app.command("set")
def set_route(
    name: Route,
    assignments: AssignmentArgument = None,
    weight: Annotated[
        list[str] | None,
        typer.Option("--weight", metavar="VARIANT=N", help="Another weight; as often as there are variants."),
    ] = None,
    file: FileOption = None,
    url: UrlOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Change a route, or make one: `headrace routes set chat --weight control=80 --weight int8=20`.

    It is in force on all gateways within a second, and stays so whatever the file says of this route.
    """
    set_entry("routes", name, assignments or [], weight or [], file, url, run_dir)


@app.command()
def delete(name: Route, url: UrlOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Take back what was set. A route that the file has is as the file says, then."""
    delete_entry("routes", name, url, run_dir)
