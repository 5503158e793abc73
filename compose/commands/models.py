"""`headrace models`: what is configured, and what a model's files say."""

from __future__ import annotations

from typing import Annotated

import typer

from compose.commands.options import ConfigOption

app = typer.Typer(help="Models: what is configured.", no_args_is_help=True)


@app.command("list")
def list_models(config: ConfigOption = None) -> None:
    """Show the configured models."""
    from rich.table import Column, Table  # local: see compose/cli.py

    from compose.fitted_table import FittedTable, output_console
    from compose.stack_config import read_config

    table = Table(Column("model", no_wrap=True), "source", "engines", "dtype", "max_model_len", box=None)
    for model in read_config(config).models:
        length = "the model's" if model.max_model_len is None else str(model.max_model_len)
        table.add_row(model.name, model.source, str(model.num_engines), model.dtype, length)
    output_console().print(FittedTable(table))


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="M", help="A configured model, or a source.")],
    config: ConfigOption = None,
) -> None:
    """Show where a model's files are and how large they are."""
    from compose.stack_config import read_config, with_flags  # local: see compose/cli.py
    from engine_service.model_source import resolve_source

    chosen = with_flags(read_config(config), model=model).models[0]
    files = resolve_source(chosen.source)
    paths = [files.path] if files.path.is_file() else sorted(files.path.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in paths)
    typer.echo(f"name    {chosen.name}\nsource  {chosen.source}\nform    {files.form}")
    typer.echo(f"path    {files.path}\nweights {num_bytes / 2**20:,.1f} MiB in {len(paths)} file(s)")
