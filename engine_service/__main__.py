"""`python -m engine_service`: one engine without the supervisor, as tests and containers start it."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from pathlib import Path

from engine_service.main import EXIT_MISCONFIGURED, run_engine
from shared.config import load_config, parse_config
from shared.errors import UserError
from shared.identifiers import EngineId


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_service", description=__doc__)
    parser.add_argument("--config", type=Path, help="headrace.toml; without it --source is needed")
    parser.add_argument("--model", help="name of a [[models]] entry, or of the model at --source")
    parser.add_argument("--source", help="package:NAME, a .gguf file, a directory, a hub id, or fake:")
    parser.add_argument("--bind", required=True, help="ipc:///path or tcp://host:port (port 0: any)")
    parser.add_argument("--advertise", help="address that gateways connect to, if not the bound one")
    parser.add_argument("--engine-id", help="default: MODEL-0")
    parser.add_argument("--redis-url")
    parser.add_argument("--namespace", default="headrace")
    parser.add_argument("--parent-pid", type=int, help="end when this process, the parent, does")
    parser.add_argument("--drain-timeout", type=_seconds, default=30.0, metavar="SECONDS")
    parser.add_argument("--force-preemption-every", type=_count, default=0, metavar="STEPS", help="for tests")
    parser.add_argument("--async-scheduling", action="store_true", help="with --source; else in the file")
    flags = parser.parse_args(arguments)
    if flags.source is not None and flags.config is not None:
        parser.error("--source and --config cannot both say what to serve")
    if flags.async_scheduling and flags.source is None:
        parser.error("--async-scheduling goes with --source; a file has async_scheduling = true")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if flags.source is not None:
            described = {
                "name": flags.model or "model",
                "source": flags.source,
                "async_scheduling": flags.async_scheduling or None,
            }
            model = parse_config({"models": [described]}).models[0]
        else:
            config = load_config(flags.config)
            model = config.model(flags.model) if flags.model else config.models[0]
    except UserError as error:
        logging.error("%s", error)
        return EXIT_MISCONFIGURED
    return run_engine(
        model,
        engine_id=EngineId(flags.engine_id or f"{model.name}-0"),
        bind=flags.bind,
        advertise=flags.advertise,
        redis_url=flags.redis_url,
        namespace=flags.namespace,
        parent_pid=flags.parent_pid,
        drain_timeout_s=flags.drain_timeout,
        force_preemption_every=flags.force_preemption_every,
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
