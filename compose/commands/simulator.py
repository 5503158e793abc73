"""`headrace simulator`: an engine without a model, as slow as it is told to be."""

from __future__ import annotations

from typing import Annotated

import typer

from compose.commands.options import DEFAULT_RUN_DIR, ConfigOption, RunDirOption
from loadtest.simulator.knobs import meanings

_KNOBS = "\n\n".join(f"{name} ({default}): {meaning}" for name, default, meaning in meanings())
EPILOG = (
    "Knobs, with their defaults. A model of headrace.toml whose source is such as "
    f'"sim:stall_s=2,stall_at_s=10" has them as well.\n\n{_KNOBS}'
)


def simulator(
    knobs: Annotated[
        list[str] | None, typer.Argument(metavar="KNOB=VALUE", help="Those below; default: the model's own.")
    ] = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="M", help="Whose requests it takes; default: the first model."),
    ] = None,
    engine_id: Annotated[
        str | None, typer.Option("--engine-id", help="Name of its place; default: M-simulated-PID.")
    ] = None,
    bind: Annotated[
        str, typer.Option("--bind", help="ZeroMQ endpoint to listen on; port 0: any.")
    ] = "tcp://127.0.0.1:0",
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", help="Endpoint that gateways connect to; default: the one of --bind."),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option("--cpus", metavar="LIST", help="Processors to keep to, such as 0-3,8; default: all."),
    ] = None,
) -> None:
    """Run an engine whose speed and faults are known, beside those of a stack that is up.

    It joins the stack of --run-dir, or that of HEADRACE_REDIS_URL. To have requests go nowhere else, give
    the model `engines = 0`, or a source `sim:`, with which `headrace up` starts such engines itself.
    """
    import os  # local: see compose/cli.py

    from compose.run_directory import CONFIG_FILE, read_stack
    from compose.service_logging import log_to_stderr
    from compose.stack_access import redis_access
    from compose.stack_config import read_config
    from loadtest.simulator.knobs import SimulatorKnobs, is_simulated, knobs_of_source, parse_knobs
    from loadtest.simulator.process import run_simulated_engine
    from shared.identifiers import EngineId

    log_to_stderr()
    given = parse_knobs(knobs) if knobs else None
    access = redis_access(run_dir, config)
    is_up = config is None and read_stack(run_dir) is not None
    settings = read_config(run_dir / CONFIG_FILE if is_up else config)
    if model is None and not settings.models:
        raise typer.BadParameter("the configuration has no [[models]]", param_hint="--model")
    chosen = settings.models[0] if model is None else settings.model(model)
    if given is None:
        given = knobs_of_source(chosen.source) if is_simulated(chosen.source) else SimulatorKnobs()
    exit_code = run_simulated_engine(
        chosen,
        given,
        engine_id=EngineId(engine_id or f"{chosen.name}-simulated-{os.getpid()}"),
        bind=bind,
        advertise=advertise,
        cpus=cpus,
        redis_url=access.url,
        namespace=access.namespace,
    )
    raise typer.Exit(exit_code)
