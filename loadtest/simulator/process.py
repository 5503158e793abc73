"""A simulated engine as a process: from its options to its exit status."""

from __future__ import annotations

import gc
import logging
import signal
import time
from types import FrameType

from loadtest.simulator.engine import SimulatedEngine
from loadtest.simulator.knobs import SimulatorKnobs
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.identifiers import EngineId
from shared.processors import parse_processors, stay_on
from shared.redis_schema import RedisKeys

logger = logging.getLogger(__name__)

EXIT_OK = 0
_OF_REAL_ENGINES = ("lora", "quantization", "kv_events_endpoint", "target_itl_ms")
DRAIN_TIMEOUT_S = 30.0  # as of real engines
REPORT_INTERVAL_S = 10.0
TOLERATED_LATENESS_S = 0.010  # more of it falsifies what is measured


def run_simulated_engine(
    config: ModelConfig,
    knobs: SimulatorKnobs,
    *,
    engine_id: EngineId,
    bind: str,
    redis_url: str,
    namespace: str,
    advertise: str | None = None,
    cpus: str | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, then finishes what it has; a second signal ends it at once.

    `cpus`: to which the process is kept, as `ModelConfig.cpus` has them. Returns the exit status. Raises
    ConfigError.
    """
    _check(config)
    if cpus is not None:
        _keep_to(cpus)
    signals: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    engine = SimulatedEngine(
        bind, redis_url, RedisKeys(namespace), config, knobs, engine_id=engine_id, advertise=advertise
    )
    gc.freeze()  # what was loaded stays: a collection need not walk it, and delay steps
    gc.enable()
    logger.info("simulated engine %s serves %s at %s", engine_id, config.name, engine.address)
    try:
        _serve(engine, signals)
        if signals and not engine.is_idle:
            logger.info("draining, for %.0f s at most", DRAIN_TIMEOUT_S)
        _drain(engine, signals)
    finally:
        engine.close()
        _tell_lateness(engine)
    return EXIT_OK


def _check(config: ModelConfig) -> None:
    if config.runner != "generate":
        raise ConfigError("a simulated engine makes no vectors", "runner")
    for name in _OF_REAL_ENGINES:
        if getattr(config, name) is not None:
            raise ConfigError(f"a simulated engine has no {name}", name)


def _keep_to(cpus: str) -> None:
    try:
        processors = parse_processors(cpus)
    except ValueError as error:
        raise ConfigError(str(error), "cpus") from error
    stay_on(processors)


def _serve(engine: SimulatedEngine, signals: list[int]) -> None:
    next_report_s = time.monotonic() + REPORT_INTERVAL_S
    num_late_told = 0
    while not signals:
        engine.turn()
        if time.monotonic() < next_report_s:
            continue
        next_report_s += REPORT_INTERVAL_S
        lateness = engine.lateness
        if lateness.num_late_steps > num_late_told and lateness.largest_s > TOLERATED_LATENESS_S:
            num_late_told = lateness.num_late_steps
            _tell_lateness(engine)


def _drain(engine: SimulatedEngine, signals: list[int]) -> None:
    num_before = len(signals)
    limit_s = time.monotonic() + DRAIN_TIMEOUT_S
    engine.drain()
    while not engine.is_idle and time.monotonic() < limit_s and len(signals) == num_before:
        engine.turn()


def _tell_lateness(engine: SimulatedEngine) -> None:
    lateness = engine.lateness
    if lateness.largest_s > TOLERATED_LATENESS_S:
        logger.warning(
            "the machine is too busy to simulate: %d of %d steps were late, by %.0f ms at the most",
            lateness.num_late_steps,
            lateness.num_steps,
            lateness.largest_s * 1e3,
        )
