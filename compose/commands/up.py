"""`headrace up`: the whole stack on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from compose.commands.options import (
    DEFAULT_RUN_DIR,
    ConfigOption,
    EngineNumberOption,
    PortOption,
    RunDirOption,
)


def up(
    config: ConfigOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="M",
            help="Serve this one: a configured model, package:NAME, a .gguf file, a directory or a hub id.",
        ),
    ] = None,
    engines: EngineNumberOption = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: PortOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Start everything on this machine: Valkey (unless HEADRACE_REDIS_URL is set), engines, gateway."""
    import asyncio  # local: see compose/cli.py
    import os

    from compose.console import Console
    from compose.run_directory import RunDirectory
    from compose.stack_config import (
        ADMIN_TOKEN,
        KEY_PEPPER,
        config_file,
        read_config,
        redis_url,
        require_free_port,
        with_compute_threads,
        with_engines,
        with_flags,
    )
    from compose.supervisor import StackSettings, Supervisor
    from compose.valkey import find_server
    from shared.processors import num_compute_cores, numa_nodes

    settings = with_flags(read_config(config), model=model, engines=engines, host=host, port=port)
    settings = with_compute_threads(with_engines(settings, numa_nodes()), num_compute_cores())
    url = redis_url(settings)
    if url is None:
        find_server()  # so that its absence is told at once
    directory = RunDirectory.open(run_dir)
    try:
        require_free_port(settings.gateway.host, settings.gateway.port)
        directory.write_config(settings)
        kept = directory.secrets(os.environ.get(KEY_PEPPER) or None)
        stack = StackSettings(
            config=settings,
            redis_url=url,
            key_pepper=kept.pepper,
            admin_token=os.environ.get(ADMIN_TOKEN) or kept.admin_token,
            followed_file=config_file(config),
            followed_model=model,
        )

        async def supervise() -> int:
            return await Supervisor(stack, directory, Console()).run()

        exit_code = asyncio.run(supervise())
    finally:
        directory.close()
    raise typer.Exit(exit_code)
