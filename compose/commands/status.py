"""`headrace status`: the engines of a stack at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.commands.options import DEFAULT_RUN_DIR, ConfigOption, RunDirOption

if TYPE_CHECKING:
    from compose.run_directory import StackRecord

REFRESH_INTERVAL_S = 1.0


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    require_ready: Annotated[
        str | None,
        typer.Option("--require-ready", metavar="ENGINE_ID", help="Exit with 1 unless it is ready."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Show engines: state, load, cache use."""
    import contextlib  # local: see compose/cli.py
    import time

    import msgspec
    import redis
    from rich.live import Live

    from compose.engine_registry import EngineRegistry
    from compose.engine_table import engine_rows, engine_table
    from compose.fitted_table import FittedTable, output_console
    from compose.run_directory import read_stack
    from compose.stack_access import redis_access
    from shared.errors import ConfigError

    access = redis_access(run_dir, config)
    stack = read_stack(run_dir)
    registry = EngineRegistry(access.connect(), access.keys)
    try:
        rows = engine_rows(registry.engines(), stack)
        if require_ready is not None:
            is_ready = any(row.engine_id == require_ready and row.state == "ready" for row in rows)
            raise typer.Exit(0 if is_ready else 1)
        configuration = None if stack is None or watch else _configuration(stack)
        if as_json:
            document = {"stack": stack and stack.url, "engines": rows, "configuration": configuration}
            typer.echo(msgspec.json.format(msgspec.json.encode(document)))
            return
        if not watch:
            output_console().print(FittedTable(engine_table(rows, stack)))
            if configuration is not None and configuration["error"] is not None:
                typer.echo(f"{configuration['path']} is not in force: {configuration['error']}")
            return
        with contextlib.suppress(KeyboardInterrupt), Live(engine_table(rows, stack), screen=True) as live:
            while True:
                time.sleep(REFRESH_INTERVAL_S)
                stack = read_stack(run_dir)
                live.update(engine_table(engine_rows(registry.engines(), stack), stack))
    except redis.RedisError as error:
        raise ConfigError(f"Redis does not answer: {error}", "HEADRACE_REDIS_URL") from error


def _configuration(stack: StackRecord) -> dict[str, Any] | None:
    """What the gateway says of its configuration file. None: it does not answer, which is told elsewhere."""
    from compose.gateway_client import GatewayClient, GatewayError  # local: see compose/cli.py

    try:
        document, _ = GatewayClient(stack.url, stack.admin_token).ask("GET", "/admin/status")
    except GatewayError:
        return None
    found: dict[str, Any] | None = document.get("configuration")
    return found
