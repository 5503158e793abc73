"""`headrace experiment`: what the A/B tests of routes have shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compose.commands.options import DEFAULT_RUN_DIR, ConfigOption, RunDirOption

if TYPE_CHECKING:
    from compose.experiment.figures import ExperimentStore

app = typer.Typer(help="A/B tests of routes: figures and verdicts.", no_args_is_help=True)


@app.command("list")
def list_experiments(config: ConfigOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> None:
    """Show the experiments that there are figures of: versions of routes that split requests."""
    from rich.table import Column, Table  # local: see compose/cli.py

    from compose.experiment.text import moment
    from compose.fitted_table import FittedTable, output_console

    whole = [Column(name, no_wrap=True) for name in ("route", "version", "subjects", "requests")]
    table = Table(*whole, "began", "last request", "variants", box=None)
    with _store(run_dir, config) as store:
        for name in store.names():
            figures = store.read(name)
            if figures is None or not figures.did_split:
                continue
            variants = figures.record.variants
            table.add_row(
                name.route,
                str(name.version),
                f"{figures.num_subjects:,}",
                f"{sum(one.assigned.requests for one in variants.values()):,}",
                moment(figures.record.began_at),
                moment(figures.record.updated_at),
                ", ".join(sorted(variants)),
            )
    nothing = "no route that splits requests over several variants has been asked yet"
    output_console().print(FittedTable(table) if table.row_count else nothing)


@app.command()
def report(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the route.")],
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="Default: the one in force.")
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", help="The primary one: ttft, tpot, e2e, failed, aborted or feedback.")
    ] = "ttft",
    control: Annotated[
        str | None, typer.Option("--control", metavar="VARIANT", help="Default: the route's first one.")
    ] = None,
    alpha: Annotated[
        float, typer.Option("--alpha", min=0.0001, max=0.5, help="Chance of a false call, over all looks.")
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page that needs no network, too.")
    ] = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Say how the variants of a route differ, and how sure that is. It may be asked as often as one likes."""
    import msgspec  # local: see compose/cli.py

    from compose.experiment.html import report_page
    from compose.experiment.report import make_report
    from compose.experiment.text import report_text
    from compose.experiment.verdict import verdict
    from compose.fitted_table import output_console
    from shared.errors import ConfigError

    if html is not None and not html.resolve().parent.is_dir():
        raise ConfigError(f"there is no folder for {html}", "--html")
    with _store(run_dir, config) as store:
        figures = store.find(name, version)
    made = make_report(figures, metric=metric, control=control, alpha=alpha)
    if html is not None:
        try:
            html.write_text(report_page(made), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {html}: {error.strerror}", "--html") from error
    if as_json:
        document = {"verdict": verdict(made), **msgspec.to_builtins(made)}
        typer.echo(msgspec.json.format(msgspec.json.encode(document)))
    else:
        output_console().print(report_text(made))


@contextmanager
def _store(run_dir: Path, config: Path | None) -> Iterator[ExperimentStore]:
    import msgspec  # local: see compose/cli.py
    import redis

    from compose.experiment.figures import ExperimentStore
    from compose.stack_access import redis_access
    from shared.errors import ConfigError

    access = redis_access(run_dir, config)
    client = access.connect()
    try:
        yield ExperimentStore(client, access.keys)
    except redis.RedisError as error:
        raise ConfigError(f"Redis does not answer: {error}", "HEADRACE_REDIS_URL") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the figures are of another version of Headrace: {error}", "NAME") from error
    finally:
        client.close()
