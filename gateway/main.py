"""The gateway process: from its start to the end of its drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from gateway.app import make_app
from gateway.config_file import ConfigSource
from gateway.connection import Connection
from gateway.services import Services, make_services
from shared.config import HeadraceConfig
from shared.errors import ConfigError
from shared.identifiers import fresh_gateway_id
from shared.telemetry import start_tracing

logger = logging.getLogger(__name__)

BACKLOG = 1024  # connections that wait to be accepted
GC_THRESHOLDS = (20_000, 50, 100)
SHUTDOWN_TIMEOUT_S = 0.2  # for connections that are idle or half-way through a request, after the drain


def run_gateway(
    config: HeadraceConfig,
    *,
    redis_url: str,
    key_pepper: bytes,
    admin_token: str,
    host: str | None = None,
    port: int | None = None,
    ready_file: Path | None = None,
    config_source: ConfigSource | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests end within the drain limit.

    Writes `{"url": ...}` to `ready_file` once it listens. Follows `config_source`, where there is one: it is
    loaded again when it changes, and at SIGHUP. Returns the process's exit code.
    Raises ConfigError when the address cannot be bound.
    """
    # Without this a text is handed to a pool of threads, which wait for more of them by spinning: on a busy
    # machine that costs more than the tokens. Long texts have a thread of ours (see Admitted.encode).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return uvloop.run(
        _serve(
            config,
            redis_url=redis_url,
            key_pepper=key_pepper,
            admin_token=admin_token,
            host=config.gateway.host if host is None else host,
            port=config.gateway.port if port is None else port,
            ready_file=ready_file,
            config_source=config_source,
        )
    )


async def _serve(
    config: HeadraceConfig,
    *,
    redis_url: str,
    key_pepper: bytes,
    admin_token: str,
    host: str,
    port: int,
    ready_file: Path | None,
    config_source: ConfigSource | None,
) -> int:
    gateway_id = fresh_gateway_id()
    services = make_services(
        config,
        redis_url=redis_url,
        key_pepper=key_pepper,
        admin_token=admin_token,
        gateway_id=gateway_id,
        tracing=start_tracing("headrace-gateway", gateway_id),
        config_source=config_source,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if config_source is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, services.config_file.ask)
    await services.start()
    # handler_cancellation: a client that leaves cancels its handler at once, wherever it waits, and
    # so aborts its sequences. Without it only the next write would notice.
    runner = web.AppRunner(
        make_app(services),
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    await runner.setup()
    try:
        listener = await _listen(runner, services, host, port)
        url = _url_of(listener, host)
        if ready_file is not None:
            _write_atomically(ready_file, msgspec.json.encode({"url": url}))
        logger.info("listening on %s", url)
        # What is there by now stays: a collection that walks it too makes every stream wait for 20 ms.
        gc.freeze()
        # What requests leave behind is mostly freed by itself: the default looks for cycles several times in
        # each of them.
        gc.set_threshold(*GC_THRESHOLDS)
        await stop.wait()
        logger.info("draining: running requests have %.0f s", config.gateway.drain_timeout_s)
        services.is_draining = True
        listener.close()  # new connections are refused; new requests on old ones get 503
        await services.running.drain(config.gateway.drain_timeout_s)
    finally:
        await runner.cleanup()
        await services.close()
    return 0


async def _listen(runner: web.AppRunner, services: Services, host: str, port: int) -> asyncio.Server:
    """In the place of one of aiohttp's sites, which have no way to choose the class of a connection."""
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None, "the runner has been set up"
    connections_logger = _connections_logger()

    def count_refusal(status: int) -> None:
        services.metrics.http_requests.labels("other", "other", str(status)).inc()

    def make_connection() -> Connection:
        return Connection(server, count_refusal, loop=loop, logger=connections_logger)

    try:
        return await loop.create_server(make_connection, host, port, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", "gateway.port") from error


def _url_of(listener: asyncio.Server, host: str) -> str:
    bound_port = listener.sockets[0].getsockname()[1]
    shown_host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://{shown_host}:{bound_port}"


def _connections_logger() -> logging.Logger:
    """aiohttp's own log, without a stack trace for every body that a client garbled."""
    connections_logger = logging.getLogger("gateway.http")

    def is_our_concern(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], web.RequestPayloadError))

    connections_logger.addFilter(is_our_concern)
    return connections_logger


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.rename(path)
