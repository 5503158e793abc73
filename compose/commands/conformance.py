"""`headrace conformance`: how exactly a server speaks OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_FAILED = 1


def conformance(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of any OpenAI-compatible server, e.g. http://host:8080")
    ],
    key: Annotated[
        str | None, typer.Option("--key", envvar="OPENAI_API_KEY", show_default=False, help="API key.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that /v1/models lists.")] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(help="For /v1/embeddings; default: one that is listed as such, or the model."),
    ] = None,
    anthropic_key: Annotated[
        str | None,
        typer.Option(
            envvar="ANTHROPIC_API_KEY", show_default=False, help="For /v1/messages; default: --key."
        ),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(help="Of a web page that may call the server (CORS); default: http://localhost:3000."),
    ] = None,
    node_modules: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="HEADRACE_NODE_MODULES",
            show_default=False,
            help="With the npm packages openai and zod; default: the nearest from here upwards.",
        ),
    ] = None,
    group: Annotated[list[str] | None, typer.Option(help="Only these groups; may be repeated.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only these rows; may be repeated.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Results as JSON, too.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Of each row.")] = 60.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Rows that do not apply count as failed.")] = False,
    list_rows: Annotated[bool, typer.Option("--list", help="Only say what there is.")] = False,
) -> None:
    """Check a server row by row. Ends with 1 if a row failed, with 2 if there is no server to check."""
    import asyncio  # local: see compose/cli.py

    from loadtest.conformance.report import closing_line, document_of, line_of
    from loadtest.conformance.server import DEFAULT_ORIGIN, open_server
    from loadtest.conformance.suite import Outcome, Result, run_rows, select_rows
    from shared.errors import UserError

    rows = select_rows(group or (), row or ())
    width = max(len(one.name) for one in rows)
    if list_rows:
        for one in rows:
            typer.echo(f"{one.name:<{width}}  {one.proves}")
        return
    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise UserError(f"there is no folder for {json_file}", "--json")

    async def run() -> list[Result]:
        results = []
        async with open_server(
            url,
            key=key,
            model=model,
            embedding_model=embedding_model,
            anthropic_key=anthropic_key,
            origin=origin or DEFAULT_ORIGIN,
            node_modules=node_modules,
        ) as server:
            typer.echo(f"{server.target.url}, model {server.model}, {len(rows)} rows\n")
            async for result in run_rows(server, rows, timeout_s=timeout, concurrency=concurrency):
                typer.echo(line_of(result, width))
                results.append(result)
            if json_file is not None:
                json_file.write_text(document_of(server.target, results), encoding="utf-8")
        return results

    results = asyncio.run(run())
    typer.echo(f"\n{closing_line(results)}")
    wrong = {Outcome.FAILED, Outcome.NOT_APPLICABLE} if strict else {Outcome.FAILED}
    if any(result.outcome in wrong for result in results):
        raise typer.Exit(EXIT_FAILED)
