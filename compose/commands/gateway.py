"""`headrace gateway`: one gateway process, as a container runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compose.commands.options import ConfigOption, PortOption


def gateway(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: PortOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            envvar="HEADRACE_RUN_DIR",
            help="Where a pepper and an admin token are kept if the environment names none.",
        ),
    ] = None,
    follow: Annotated[
        Path | None,
        typer.Option(
            "--follow",
            metavar="FILE",
            help="Take tenants, routes and options from this file whenever it changes; default: --config.",
        ),
    ] = None,
    follow_model: Annotated[
        str | None,
        typer.Option("--follow-model", metavar="M", help="As `headrace up --model`, for that file."),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help='Gets {"url": …} once the gateway listens.')
    ] = None,
) -> None:
    """Run one gateway. Needs HEADRACE_REDIS_URL, and HEADRACE_KEY_PEPPER and HEADRACE_ADMIN_TOKEN or a run
    directory that keeps them. A configuration file is followed while it runs, and read again at SIGHUP.
    """
    from compose.run_directory import secrets_of  # local: see compose/cli.py
    from compose.service_logging import log_to_stderr
    from compose.stack_config import (
        ADMIN_TOKEN,
        KEY_PEPPER,
        REDIS_URL,
        config_file,
        read_config,
        redis_url,
        required_secret,
        with_flags,
    )
    from gateway.config_file import ConfigSource
    from gateway.main import run_gateway

    log_to_stderr()
    settings = read_config(config)
    followed = config_file(follow or config)
    url = redis_url(settings) or required_secret(REDIS_URL)
    kept = secrets_of(run_dir) if run_dir is not None else None
    exit_code = run_gateway(
        settings,
        redis_url=url,
        key_pepper=required_secret(KEY_PEPPER, kept.pepper if kept else None).encode(),
        admin_token=required_secret(ADMIN_TOKEN, kept.admin_token if kept else None),
        host=host,
        port=port,
        ready_file=ready_file,
        config_source=None
        if followed is None
        else ConfigSource(
            followed,
            lambda may_be_empty: with_flags(
                read_config(followed, may_be_empty=may_be_empty), model=follow_model
            ),
        ),
    )
    raise typer.Exit(exit_code)
