"""The gateway process: from its start to the end of its drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from gateway.app import make_app
from gateway.openai.body import GARBLED_BODY
from gateway.services import make_services
from shared.config import HeadraceConfig
from shared.errors import ConfigError
from shared.identifiers import fresh_gateway_id
from shared.telemetry import start_tracing

logger = logging.getLogger(__name__)

KEEPALIVE_TIMEOUT_S = 75.0
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
) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests end within the drain limit.

    Writes `{"url": ...}` to `ready_file` once it listens. Returns the process's exit code.
    Raises ConfigError when the address cannot be bound.
    """
    return uvloop.run(
        _serve(
            config,
            redis_url=redis_url,
            key_pepper=key_pepper,
            admin_token=admin_token,
            host=config.gateway.host if host is None else host,
            port=config.gateway.port if port is None else port,
            ready_file=ready_file,
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
) -> int:
    gateway_id = fresh_gateway_id()
    services = make_services(
        config,
        redis_url=redis_url,
        key_pepper=key_pepper,
        admin_token=admin_token,
        gateway_id=gateway_id,
        tracing=start_tracing("headrace-gateway", gateway_id),
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await services.start()
    # handler_cancellation: a client that leaves cancels its handler at once, wherever it waits, and
    # so aborts its sequences. Without it only the next write would notice.
    runner = web.AppRunner(
        make_app(services),
        handler_cancellation=True,
        access_log=None,
        logger=_server_logger(),
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    await runner.setup()
    try:
        url = await _listen(runner, host, port)
        if ready_file is not None:
            _write_atomically(ready_file, msgspec.json.encode({"url": url}))
        logger.info("listening on %s", url)
        await stop.wait()
        logger.info("draining: running requests have %.0f s", config.gateway.drain_timeout_s)
        services.is_draining = True
        for site in list(runner.sites):
            await site.stop()  # new connections are refused; new requests on old ones get 503
        await services.running.drain(config.gateway.drain_timeout_s)
    finally:
        await runner.cleanup()
        await services.close()
    return 0


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    site = web.TCPSite(runner, host, port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", "gateway.port") from error
    bound_port = runner.addresses[0][1]
    shown_host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://{shown_host}:{bound_port}"


def _server_logger() -> logging.Logger:
    """aiohttp's own log, without a stack trace for every body that a client garbled."""
    server_logger = logging.getLogger("gateway.http")

    def is_our_concern(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], GARBLED_BODY))

    server_logger.addFilter(is_our_concern)
    return server_logger


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.rename(path)
