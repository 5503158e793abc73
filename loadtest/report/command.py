"""The command line of `headrace report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loadtest.report.bench_result import BenchRun


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Of `headrace knee --json`, or some of `bench serve`."),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="One page that needs no network.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FOLDER", help="A picture of each chart.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FOLDER", help="The numbers of each chart.")
    ] = None,
    trace_url: Annotated[
        str | None,
        typer.Option(
            "--trace-url", metavar="URL", help="Links to traces, like http://jaeger:16686/trace/{trace_id}."
        ),
    ] = None,
) -> None:
    """Show what a load test has found: in words, as one page of HTML, as pictures or as tables."""
    # Local: numpy and matplotlib would slow down every `headrace --help`.
    from loadtest.report.bench_html import bench_charts, write_bench_html
    from loadtest.report.chart import write_csv, write_png
    from loadtest.report.html import knee_charts, write_html
    from loadtest.report.result_files import read_results
    from loadtest.report.words import headline, verdict
    from loadtest.report.worst_requests import check_trace_url
    from shared.errors import ConfigError

    check_trace_url(trace_url)
    if html is not None and html.resolve() in {file.resolve() for file in files}:
        raise ConfigError(f"{html} is the measurement itself: the page needs a file of its own", "--html")
    found = read_results(files)
    if isinstance(found, list):
        _print_runs(found)
        charts = bench_charts(found) if png or csv else []
        if html is not None:
            write_bench_html(found, html, trace_url=trace_url)
    else:
        typer.echo("\n".join([headline(found), *verdict(found)]))
        charts = knee_charts(found) if png or csv else []
        if html is not None:
            write_html(found, html, trace_url=trace_url)
    written = [
        *([html] if html else []),
        *(write_png(charts, png) if png else []),
        *(write_csv(charts, csv) if csv else []),
    ]
    for path in written:
        typer.echo(f"written: {path}", err=True)


def _print_runs(runs: Sequence[BenchRun]) -> None:
    from loadtest.report.bench_html import run_sentence  # local: see above

    for run in runs:
        typer.echo(run_sentence(run))
