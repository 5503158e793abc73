"""`headrace bench`: load tests. The flags of `serve` belong to loadtest; the stack of --start-stack to us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from loadtest.serve_command import RunningStack, StackStarter, register

app = typer.Typer(help="Load tests.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Load tests."""  # a group even while it has a single command


@contextmanager
def _stack() -> Iterator[RunningStack]:
    from compose.temporary_stack import temporary_stack  # local: see compose/cli.py

    with temporary_stack() as stack:
        yield RunningStack(base_url=stack.url, api_key=stack.demo_key)


register(app, StackStarter(_stack))
