"""The `headrace` command.

The modules in `compose/commands/` import what a command runs inside of its function. That is on
purpose: `headrace --help` must not load torch, and `headrace gateway` must not load more than the
gateway.
"""

from __future__ import annotations

import sys

import typer

from compose.commands import (
    audit,
    bench,
    chat,
    conformance,
    engine,
    experiment,
    gateway,
    keys,
    models,
    routes,
    simulator,
    status,
    tenants,
    up,
    usage,
)
from loadtest.compare_command import compare
from loadtest.knee_command import knee
from loadtest.plan.command import plan
from loadtest.report.command import report
from shared.errors import UserError

EXIT_USER_ERROR = 2

app = typer.Typer(
    name="headrace",
    help="Serve language models on your own machines behind one OpenAI-style API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("gateway")(gateway.gateway)
app.command("engine")(engine.engine)
app.command("simulator", epilog=simulator.EPILOG)(simulator.simulator)
app.add_typer(keys.app, name="keys")
app.add_typer(experiment.app, name="experiment")
app.add_typer(tenants.app, name="tenants")
app.add_typer(routes.app, name="routes")
app.command("audit")(audit.audit)
app.command("usage")(usage.usage)
app.command("status")(status.status)
app.command("chat")(chat.chat)
app.add_typer(bench.app, name="bench")
app.command("knee")(knee)
app.command("plan")(plan)
app.command("report")(report)
app.command("compare")(compare)
app.command("conformance")(conformance.conformance)
app.add_typer(models.app, name="models")


def main() -> None:
    """Runs the command of sys.argv. What the user got wrong is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        named = error.param is None or error.param in error.message
        print(f"headrace: {error.message if named else f'{error.param}: {error.message}'}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
