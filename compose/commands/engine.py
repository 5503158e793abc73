"""`headrace engine`: one engine process, as a container runs it."""

from __future__ import annotations

from typing import Annotated

import typer

from compose.commands.options import ConfigOption


def engine(
    config: ConfigOption = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="M", help="A configured model, or a source; default: the first one."),
    ] = None,
    engine_id: Annotated[
        str | None, typer.Option("--engine-id", help="Name of its place; default: model and host name.")
    ] = None,
    bind: Annotated[
        str, typer.Option("--bind", help="ZeroMQ endpoint to listen on.")
    ] = "tcp://127.0.0.1:5555",
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", help="Endpoint that gateways connect to; default: the one of --bind."),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option("--cpus", metavar="LIST", help="Processors to keep to, such as 0-3,8; default: all."),
    ] = None,
) -> None:
    """Run one engine. Needs HEADRACE_REDIS_URL."""
    import gc  # local: see compose/cli.py
    import socket

    # While modules and the model are loaded next to nothing becomes garbage, and looking for it took a tenth
    # of the start. run_engine switches it on again.
    gc.disable()

    from compose.service_logging import log_to_stderr
    from compose.stack_config import REDIS_URL, read_config, redis_url, required_secret, with_flags
    from loadtest.simulator.knobs import is_simulated, knobs_of_source
    from shared.identifiers import EngineId

    log_to_stderr()
    settings = with_flags(read_config(config), model=model)
    if model is None and not settings.models:
        raise typer.BadParameter("the configuration has no [[models]]", param_hint="--model")
    chosen = settings.models[0]
    chosen_id = EngineId(engine_id or f"{chosen.name}-{socket.gethostname()}")
    url = redis_url(settings) or required_secret(REDIS_URL)
    if is_simulated(chosen.source):
        from loadtest.simulator.process import run_simulated_engine

        exit_code = run_simulated_engine(
            chosen,
            knobs_of_source(chosen.source),
            engine_id=chosen_id,
            bind=bind,
            advertise=advertise,
            cpus=cpus,
            redis_url=url,
            namespace=settings.redis.namespace,
        )
        raise typer.Exit(exit_code)

    from engine_service.main import run_engine

    exit_code = run_engine(
        chosen,
        engine_id=chosen_id,
        bind=bind,
        advertise=advertise,
        cpus=cpus,
        redis_url=url,
        namespace=settings.redis.namespace,
    )
    raise typer.Exit(exit_code)
