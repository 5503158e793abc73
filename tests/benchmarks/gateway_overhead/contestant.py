"""The gateways that are compared, each as a context in which it runs, pinned to a processor of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil

from tests.benchmarks.gateway_overhead import instant_engine, upstream
from tests.stack import Stack
from tests.valkey_server import running_valkey

STREAMED_MODEL = "streamed"
_START_TIMEOUT_S = 120
# Those of the machine: this process and what it starts are kept to the first one.
CLIENTS_PROCESSOR, GATEWAYS_PROCESSOR = sorted(psutil.Process(1).cpu_affinity() or [0, 1])[:2]


@dataclass(frozen=True, slots=True)
class Target:
    """What a client needs to know. `pid`: of the gateway; None: there is none in between."""

    port: int
    key: str
    model: str
    streamed_model: str
    pid: int | None
    varies: bool = True  # each request has a text of its own


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    running: Callable[[], AbstractContextManager[Target]]


@contextmanager
def direct() -> Iterator[Target]:
    with _running_upstream() as port:
        yield Target(port, "none", upstream.MODEL, upstream.MODEL, None)


@contextmanager
def headrace(*, varies: bool = True) -> Iterator[Target]:
    """With all that a tenant may be given: a key, limits of each kind, a route of two variants, records."""
    model, streamed = upstream.MODEL, STREAMED_MODEL
    many = 100_000_000
    document = {
        "models": [{"name": name, "source": "fake:", "engines": 0} for name in (model, streamed)],
        "tenants": [
            {
                "name": "bench",
                "requests_per_minute": many,
                "input_tokens_per_minute": many,
                "output_tokens_per_minute": many,
                "tokens_per_day": 1_000 * many,
                "max_concurrency": 4096,
                "route_limits": {"chat": {"requests_per_minute": many}},
            }
        ],
        "routes": [
            {
                "name": name,
                "sticky": "key",
                "split": [
                    {"variant": "control", "model": target, "weight": 90},
                    {"variant": "treated", "model": target, "weight": 10},
                ],
            }
            for name, target in (("chat", model), ("chat-streamed", streamed))
        ],
    }
    with (
        tempfile.TemporaryDirectory(prefix="hr-") as directory,
        running_valkey(Path(directory)) as redis_url,
        Stack(redis_url, document, fresh=True) as stack,
        _running_engine(model, 1, Path(directory), stack),
        _running_engine(streamed, upstream.NUM_TOKENS, Path(directory), stack),
    ):
        pid = stack.processes["gateway"].pid
        psutil.Process(pid).cpu_affinity([GATEWAYS_PROCESSOR])
        stack.wait_linked(2)
        port = int(stack.url.rsplit(":", 1)[1])
        yield Target(port, stack.key(), "chat", "chat-streamed", pid, varies)


def vllm_router(program: Path) -> Callable[[], AbstractContextManager[Target]]:
    @contextmanager
    def running() -> Iterator[Target]:
        port, metrics_port = _free_port(), _free_port()
        with _running_upstream() as upstream_port:
            command = [
                program, "--worker-urls", f"http://127.0.0.1:{upstream_port}", "--policy", "round_robin",
                "--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics_port,
            ]  # fmt: skip
            with _running_gateway([str(part) for part in command], port, "none") as pid:
                yield Target(port, "none", upstream.MODEL, upstream.MODEL, pid)

    return running


def litellm(program: Path) -> Callable[[], AbstractContextManager[Target]]:
    @contextmanager
    def running() -> Iterator[Target]:
        port, key = _free_port(), f"sk-{secrets.token_hex(24)}"
        with _running_upstream() as upstream_port, tempfile.TemporaryDirectory() as directory:
            configuration = Path(directory) / "config.yaml"  # JSON is YAML
            parameters = {
                "model": f"openai/{upstream.MODEL}",
                "api_base": f"http://127.0.0.1:{upstream_port}/v1",
                "api_key": "none",
            }
            configuration.write_text(
                json.dumps({"model_list": [{"model_name": upstream.MODEL, "litellm_params": parameters}]})
            )
            command = [program, "--config", configuration, "--num_workers", 1, "--port", port]
            environment = {"LITELLM_MASTER_KEY": key, "LITELLM_LOG": "ERROR"}
            with _running_gateway([str(part) for part in command], port, key, environment) as pid:
                yield Target(port, key, upstream.MODEL, upstream.MODEL, pid)

    return running


@contextmanager
def _running_upstream() -> Iterator[int]:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=upstream.run, args=(theirs,))
    process.start()
    try:
        port: int = ours.recv()
        yield port
    finally:
        ours.send("end")
        process.join(10)


@contextmanager
def _running_engine(model: str, num_messages: int, directory: Path, stack: Stack) -> Iterator[None]:
    ours, theirs = get_context("spawn").Pipe()
    address = f"ipc://{directory}/{model}.sock"
    arguments = (model, address, stack.redis_url, stack.config.redis.namespace, num_messages, theirs)
    process = get_context("spawn").Process(target=instant_engine.run, args=arguments)
    process.start()
    try:
        assert ours.recv() == "listening"
        yield
    finally:
        ours.send("end")
        process.join(10)


@contextmanager
def _running_gateway(
    command: list[str], port: int, key: str, environment: dict[str, str] | None = None
) -> Iterator[int]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        try:
            psutil.Process(process.pid).cpu_affinity([GATEWAYS_PROCESSOR])
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _answers(port, key):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} does not serve: {log.read()[-2000:].decode()}")
                time.sleep(0.2)
            yield process.pid
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.terminate()
            process.terminate()
            process.wait(20)


def _answers(port: int, key: str) -> bool:
    body = json.dumps({"model": upstream.MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
