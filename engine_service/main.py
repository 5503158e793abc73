"""One engine process, from its options to its exit status."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType

import zmq

from engine_service.compute_thread import ComputeThread
from engine_service.embedding_loop import EmbeddingLoop
from engine_service.openmp import bound_openmp_spinning
from engine_service.parent_process import die_with, is_orphan
from engine_service.served_embedder import ServedEmbedder, build_embedding_engine, make_card
from engine_service.served_model import ServedModel, build_engine, num_compute_threads, overlaps_steps
from engine_service.service import EngineService, MakeLoop, ServiceEnded
from engine_service.step_execution import OverlappedExecution
from engine_service.step_loop import StepLoop
from engine_service.tracing import RequestSpans
from engine_service.transport.kv_event_publisher import KvEventPublisher
from shared.config import ModelConfig
from shared.engine_endpoint import advertised_address, bind_router, remove_socket_file
from shared.engine_registry import Registry
from shared.errors import ConfigError, UserError
from shared.identifiers import EngineEpoch, EngineId, fresh_epoch
from shared.messages import EngineLoad
from shared.processors import parse_processors, stay_on
from shared.redis_client import connect
from shared.redis_schema import EngineRecord, EngineState, RedisKeys
from shared.telemetry import Tracing, start_tracing

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2

FAKE_SOURCE = "fake:"
_PARENT_CHECK_INTERVAL_S = 1.0
_STUCK_STEP_S = 10.0  # beyond the drain limit, for the step that is being computed
_COMPUTE_END_S = 1.0  # for a step that nobody waits for any more
_LINGER_MS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Where an engine stands, beside what it serves."""

    engine_id: EngineId
    bind: str  # ipc:///path or tcp://host:port; port 0 or *: any
    advertise: str | None = None  # what gateways connect to, where that differs from `bind`
    redis_url: str | None = None  # None: the engine is in no registry
    namespace: str = "headrace"
    redis_timeout_ms: int = 500
    cpus: str | None = None  # to which the process is kept, as `ModelConfig.cpus` has them
    parent_pid: int | None = None  # the engine ends when this process, its parent, does
    drain_timeout_s: float = 30.0
    force_preemption_every: int = 0  # for tests, see Scheduler


def run_engine(
    config: ModelConfig,
    *,
    engine_id: EngineId,
    bind: str,
    advertise: str | None = None,
    redis_url: str | None = None,
    namespace: str = "headrace",
    redis_timeout_ms: int = 500,
    cpus: str | None = None,
    parent_pid: int | None = None,
    drain_timeout_s: float = 30.0,
    force_preemption_every: int = 0,
) -> int:
    """Serves one model until SIGTERM or SIGINT; returns the exit status. Options as in EngineOptions.

    The first signal drains, a second one ends the engine with the step that is being computed.
    """
    options = EngineOptions(
        engine_id=engine_id,
        bind=bind,
        advertise=advertise,
        redis_url=redis_url,
        namespace=namespace,
        redis_timeout_ms=redis_timeout_ms,
        cpus=cpus,
        parent_pid=parent_pid,
        drain_timeout_s=drain_timeout_s,
        force_preemption_every=force_preemption_every,
    )
    if parent_pid is not None:
        die_with(parent_pid)
    try:
        if cpus is not None:
            _keep_to(cpus)
        return EngineProcess(config, options).run()
    except UserError as error:
        logger.error("%s", error)
        return EXIT_MISCONFIGURED


def _keep_to(cpus: str) -> None:
    """Raises ConfigError."""
    try:
        processors = parse_processors(cpus)
    except ValueError as error:
        raise ConfigError(str(error), "cpus") from error
    stay_on(processors)


def load_served_model(config: ModelConfig) -> ServedModel:
    """The model of `config.source`. Call it in the thread that will compute. Raises ConfigError."""
    # Imported here and not above: torch takes seconds, which a fake model does not need.
    if config.source.startswith(FAKE_SOURCE):
        if config.lora is not None:
            raise ConfigError("an adapter has no matrices to change in a fake model", "lora")
        from engine_service.fake_model import load_fake_model

        return load_fake_model(config)
    bound_openmp_spinning()
    from engine_service.loaders.load import load_model
    from engine_service.model_runner import ModelRunner, use_threads

    num_threads = num_compute_threads(config)
    use_threads(num_threads)
    loaded = load_model(config, num_threads)
    runner = ModelRunner(config, loaded, num_threads=num_threads)
    if config.num_threads is None and config.has_own_processors:  # else others measure at the same time
        runner.choose_num_threads()
    if runner.is_native:  # torch's own threads would fight with those for the cores
        use_threads(1)
    return ServedModel(runner, runner.model_card, runner.text_bundle)


def load_served_embedder(config: ModelConfig) -> ServedEmbedder:
    """The embedding model of `config.source`; else as `load_served_model`."""
    if config.source.startswith(FAKE_SOURCE):
        from engine_service.fake_embedder import load_fake_embedder

        return load_fake_embedder(config)
    bound_openmp_spinning()
    from engine_service.embedding_runner import EmbeddingRunner
    from engine_service.loaders.embedding import load_embedder
    from engine_service.model_runner import use_threads

    num_threads = num_compute_threads(config)
    use_threads(num_threads)
    loaded = load_embedder(config, num_threads)
    runner = EmbeddingRunner(config, loaded, num_threads=num_threads)
    if runner.is_native:
        use_threads(1)
    card = make_card(
        config,
        architecture=loaded.architecture,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        embedding_dim=runner.vectors([[0]]).shape[1],  # of a first text, whose trouble is better seen now
        matryoshka_dimensions=loaded.matryoshka_dimensions,
    )
    return ServedEmbedder(runner, card, loaded.text_bundle)


class EngineProcess:
    """The main thread: owns the socket's context, the registry's thread and the signals."""

    def __init__(self, config: ModelConfig, options: EngineOptions) -> None:
        self._config = config
        self._options = options
        self._epoch: EngineEpoch = fresh_epoch()
        self._compute = ComputeThread()
        self._address = ""
        self._state: EngineState = "loading"
        self._service: EngineService | None = None
        self._registry: Registry | None = None
        self._kv_events: KvEventPublisher | None = None
        # A SimpleQueue, because its `put` is safe in a signal handler, unlike Event.set.
        self._events: queue.SimpleQueue[ServiceEnded | signal.Signals] = queue.SimpleQueue()

    def run(self) -> int:
        """Raises UserError if the engine cannot start as configured."""
        options = self._options
        self._listen_for_signals()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            # Before loading: a wrong address is told at once, and the real port is known.
            router = bind_router(context, options.bind)
        except UserError:
            context.term()
            raise
        try:
            bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._address = advertised_address(bound, options.advertise)
            self._kv_events = self._bind_kv_events(context)
            self._start_registry()
            return self._serve(self._compute.call(self._load), router)
        finally:
            if self._registry is not None:
                self._registry.stop()
            if self._kv_events is not None:
                self._kv_events.close()
            self._compute.close()
            self._compute.join(_COMPUTE_END_S)
            context.destroy(linger=_LINGER_MS)
            remove_socket_file(options.bind)

    def _load(self) -> ServedModel | ServedEmbedder:
        if self._config.runner == "pooling":
            return load_served_embedder(self._config)
        return load_served_model(self._config)

    def _serve(self, served: ServedModel | ServedEmbedder, router: zmq.Socket[bytes]) -> int:
        tracing = start_tracing("headrace-engine", self._options.engine_id)
        service = self._build_service(served, router, tracing)
        # What was loaded stays; collections while serving need not walk it. None is made now: it would find a
        # megabyte, in a tenth of a second.
        gc.freeze()
        gc.enable()
        if self._kv_events is not None:
            self._kv_events.start()
        service.start()
        self._service = service
        self._enter("ready")
        logger.info(
            "engine %s (epoch %s) serves %s at %s",
            self._options.engine_id,
            self._epoch,
            self._config.name,
            self._address,
        )
        try:
            return self._wait(service)
        finally:
            service.close()
            tracing.shutdown()

    def _build_service(
        self, served: ServedModel | ServedEmbedder, router: zmq.Socket[bytes], tracing: Tracing
    ) -> EngineService:
        make_loop, load = self._build_engine(served)
        spans = RequestSpans(tracing, self._options.engine_id) if tracing.enabled else None
        return EngineService(
            make_loop,
            load,
            served.card,
            served.text_bundle,
            router,
            ComputeThread("loop") if overlaps_steps(self._config) else self._compute,
            engine_id=self._options.engine_id,
            epoch=self._epoch,
            max_queued_requests=self._config.max_queued_requests,
            on_ended=self._events.put,
            on_finished=spans.record if spans is not None else None,
        )

    def _build_engine(self, served: ServedModel | ServedEmbedder) -> tuple[MakeLoop, EngineLoad]:
        """What makes the loop around the engine, and the load that it begins with."""
        epoch = self._epoch
        if isinstance(served, ServedEmbedder):
            embedding_engine = build_embedding_engine(self._config, served)
            load = embedding_engine.load()
            return lambda inbox, outbox: EmbeddingLoop(embedding_engine, inbox, outbox, epoch), load
        engine = build_engine(
            self._config,
            served,
            execution=OverlappedExecution(self._compute) if overlaps_steps(self._config) else None,
            publish_kv_events=self._kv_events.publish if self._kv_events is not None else None,
            force_preemption_every=self._options.force_preemption_every,
        )
        return lambda inbox, outbox: StepLoop(engine, inbox, outbox, epoch), engine.load()

    def _bind_kv_events(self, context: zmq.Context[zmq.Socket[bytes]]) -> KvEventPublisher | None:
        """None unless configured. Raises ConfigError."""
        config, engine_id = self._config, self._options.engine_id
        if config.kv_events_endpoint is None:
            return None
        replay_endpoint = config.kv_events_replay_endpoint
        return KvEventPublisher(
            context,
            config.kv_events_endpoint.replace("{engine_id}", engine_id),
            replay_endpoint=replay_endpoint and replay_endpoint.replace("{engine_id}", engine_id),
            topic=config.kv_events_topic.replace("{engine_id}", engine_id),
            on_failed=lambda error: self._events.put(ServiceEnded(error)),
        )

    def _wait(self, service: EngineService) -> int:
        """Until the service has ended, by a signal or by itself."""
        stuck_at_s: float | None = None
        while True:
            try:
                event = self._events.get(timeout=_PARENT_CHECK_INTERVAL_S)
            except queue.Empty:
                if self._options.parent_pid is not None and is_orphan(self._options.parent_pid):
                    logger.critical("the parent process has ended, and so does this engine")
                    return EXIT_FAILED
                if service.stalled_for_s > self._config.watchdog_timeout_s:
                    return self._end_stalled(service)
                if stuck_at_s is not None and time.monotonic() > stuck_at_s:
                    logger.critical("the step that is being computed does not return; given up")
                    return EXIT_FAILED
                continue
            if isinstance(event, ServiceEnded):
                return EXIT_OK if event.error is None else EXIT_FAILED
            limit_s = self._options.drain_timeout_s if self._state == "ready" else 0.0
            logger.info("%s: draining, for %.0f s at most", event.name, limit_s)
            stuck_at_s = time.monotonic() + limit_s + _STUCK_STEP_S
            self._enter("draining")
            service.drain(limit_s)

    def _end_stalled(self, service: EngineService) -> int:
        """Health means progress: an engine that makes none is better started anew."""
        reason = f"there is work, and no step was done in {service.stalled_for_s:.0f} s"
        logger.critical("%s: this engine ends", reason)
        self._enter("stalled")
        service.give_up(reason)
        return EXIT_FAILED

    def _enter(self, state: EngineState) -> None:
        self._state = state
        if self._registry is not None:
            self._registry.refresh()

    def _start_registry(self) -> None:
        options = self._options
        if options.redis_url is not None:
            client = connect(options.redis_url, options.redis_timeout_ms)
            self._registry = Registry(client, RedisKeys(options.namespace), self._record)
            self._registry.start()

    def _record(self) -> EngineRecord:
        """What the registry tells of this engine; called in its thread."""
        return EngineRecord(
            engine_id=self._options.engine_id,
            epoch=self._epoch,
            address=self._address,
            model=self._config.name,
            state=self._state,
            pid=os.getpid(),
            load=self._service.load if self._service is not None else None,
        )

    def _listen_for_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._state == "loading":
            raise SystemExit(EXIT_OK)  # nothing was accepted, so nothing is waited for
        self._events.put(signal.Signals(number))
