"""What `headrace tenants` and `headrace routes` have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from compose.policy_desk import PolicyDesk

EXIT_FAILED = 1

Kind = Literal["tenants", "routes"]
JsonOption = Annotated[bool, typer.Option("--json", help="For scripts.")]
AssignmentArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Options as in headrace.toml; the others stay."),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file", metavar="FILE", help="TOML or JSON: the whole entry, or a headrace.toml that has it."
    ),
]


def print_table(kind: Kind, as_json: bool, url: str | None, run_dir: Path) -> None:
    from compose.fitted_table import FittedTable, output_console  # local: see compose/cli.py
    from compose.policy_table import routes_table, tenants_table

    with open_desk(url, run_dir) as desk:
        entries = desk.list(kind)
    if as_json:
        print_json(entries)
    else:
        table = tenants_table(entries) if kind == "tenants" else routes_table(entries)
        output_console().print(FittedTable(table))


def show_entry(kind: Kind, name: str, url: str | None, run_dir: Path) -> None:
    with open_desk(url, run_dir) as desk:
        print_json(desk.show(kind, name))


def set_entry(
    kind: Kind,
    name: str,
    assignments: list[str],
    weights: list[str],
    file: Path | None,
    url: str | None,
    run_dir: Path,
) -> None:
    """A file is the whole entry; without one the entry in force is changed."""
    from compose.policy_desk import from_assignments, from_file, reweighed, weights_of  # local: see cli.py
    from shared.errors import ConfigError

    if not assignments and not weights and file is None:
        raise ConfigError("nothing to set: give KEY=VALUE, or --file", "KEY=VALUE")
    given = None if file is None else from_file(kind, name, file)
    values, new_weights = from_assignments(assignments), weights_of(weights)

    def change(before: dict[str, Any]) -> dict[str, Any]:
        after = {**(before if given is None else given), **values}
        return reweighed(after, new_weights) if new_weights else after

    with open_desk(url, run_dir) as desk:
        document = desk.change(kind, name, change)
    for warning in document.get("warnings", ()):
        typer.echo(f"headrace: {warning}", err=True)
    typer.echo(f"{name} is set, in version {document['policy_version']} of the policy", err=True)


def delete_entry(kind: Kind, name: str, url: str | None, run_dir: Path) -> None:
    with open_desk(url, run_dir) as desk:
        document = desk.delete(kind, name)
    told = "it is gone" if document["now"] is None else "it is as the configuration file says"
    typer.echo(f"{name}: {told}, in version {document['policy_version']} of the policy", err=True)


@contextmanager
def open_desk(url: str | None, run_dir: Path) -> Iterator[PolicyDesk]:
    from compose.gateway_client import GatewayError  # local: see compose/cli.py
    from compose.policy_desk import PolicyDesk
    from compose.stack_access import admin_api_access

    try:
        yield PolicyDesk(admin_api_access(run_dir, url))
    except GatewayError as error:
        typer.echo(f"headrace: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def print_json(document: Any) -> None:
    import msgspec  # local: see compose/cli.py

    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
