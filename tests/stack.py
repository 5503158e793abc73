"""A stack of real processes on one Redis: a gateway and engines, under a test's control.

The supervisor has tests of its own; in a `Stack` every process is started and ended by the test, so that a
test can choose what dies when.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.api_keys import ApiKeyStore
from shared.config import HeadraceConfig, parse_config
from shared.identifiers import TenantId
from shared.redis_client import connect
from shared.redis_schema import RedisKeys
from tests.warm_process import WarmProcess, can_be_warm, start_warm

PEPPER = "test-pepper"
ADMIN_TOKEN = "test-admin-token"


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "the condition") -> Any:
    """Polls until the condition holds, and returns its value; fails the test otherwise."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.02)
    return value


class RunningStack:
    """What a test can ask of a stack, whoever has started it."""

    def __init__(self, redis_url: str, namespace: str, *, pepper: str, admin_token: str) -> None:
        self.url = ""  # of the gateway that is asked
        self.redis_url = redis_url
        self.redis = connect(redis_url, 2000)
        self.keys = RedisKeys(namespace)
        self._pepper = pepper
        self._admin_token = admin_token

    def key_of(self, tenant: str) -> str:
        """A new API key."""
        store = ApiKeyStore(self.redis, self.keys, self._pepper.encode())
        return store.create(TenantId(tenant)).secret

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def admin_status(self) -> dict[str, Any]:
        status, body = self.get("/admin/status", {"Authorization": f"Bearer {self._admin_token}"})
        assert status == 200, body
        return json.loads(body)

    def gauges(self) -> dict[str, int]:
        """What still runs anywhere: all zero when the stack is idle."""
        engines = self.admin_status()["engines"]
        return {
            "in flight": sum(engine["in_flight"] for engine in engines),
            "running": sum((engine["load"] or {}).get("num_running", 0) for engine in engines),
            "waiting": sum((engine["load"] or {}).get("num_waiting", 0) for engine in engines),
            "blocks held": sum(
                load["num_blocks"] - load["num_free_blocks"] for e in engines if (load := e["load"])
            ),
        }


class Stack(RunningStack):
    """Use as a context manager. Everything it started is dead afterwards.

    `fresh`: each process is an interpreter of its own from its first line on, for tests about just that and
    for measurements. Otherwise most are warm ones, see `tests.warm_process`.
    """

    def __init__(
        self,
        redis_url: str,
        document: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self._fresh = fresh
        document = document or {"models": [fake_model()]}
        document.setdefault("redis", {})["namespace"] = f"test-{uuid.uuid4().hex[:10]}"
        self.config: HeadraceConfig = parse_config(document)
        super().__init__(redis_url, self.config.redis.namespace, pepper=PEPPER, admin_token=ADMIN_TOKEN)
        self.processes: dict[str, subprocess.Popen[bytes] | WarmProcess] = {}
        self.urls: list[str] = []
        self._environment = environment or {}
        self._directory = tempfile.TemporaryDirectory(prefix="hr-")  # short: unix socket paths are
        self.directory = Path(self._directory.name)
        self._config_file = self.directory / "headrace.json"
        self.rewrite_config(self.config.model_dump(mode="json"))

    def __enter__(self) -> Stack:
        try:
            for model in self.config.models:
                for number in range(model.num_engines):
                    self.start_engine(model.name, number)
            self.start_gateway()
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self.redis.close()
        self._directory.cleanup()

    def rewrite_config(self, document: dict[str, Any] | str) -> None:
        """What gateways that run take over from it, and those that start begin with."""
        text = document if isinstance(document, str) else json.dumps(document)
        fresh = self._config_file.with_suffix(".fresh")
        fresh.write_text(text)
        fresh.replace(self._config_file)

    def start_engine(self, model: str, number: int) -> subprocess.Popen[bytes] | WarmProcess:
        engine_id = f"{model}-{number}"
        return self._start(
            engine_id,
            "engine",
            "--model",
            model,
            "--engine-id",
            engine_id,
            "--bind",
            f"ipc://{self.directory}/{number}-{len(self.processes)}.sock",
        )

    def start_gateway(
        self, name: str = "gateway", *options: str, environment: dict[str, str] | None = None
    ) -> str:
        ready_file = self.directory / f"{name}.json"
        ready_file.unlink(missing_ok=True)
        arguments = ("gateway", "--port", "0", "--ready-file", str(ready_file), *options)
        process = self._start(name, *arguments, environment=environment)

        def is_listening() -> bool:
            assert process.poll() is None, self.log(name)
            return ready_file.exists()

        wait_until(is_listening, what=f"{name} listening")
        self.url = json.loads(ready_file.read_bytes())["url"]
        self.urls.append(self.url)
        return self.url

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        wait_until(lambda: self.get("/readyz")[0] == 200, timeout_s, f"readiness\n{self.log('gateway')}")
        self.wait_linked(sum(model.num_engines for model in self.config.models), timeout_s)

    def wait_linked(self, num_engines: int, timeout_s: float = 60.0) -> None:
        def are_linked() -> bool:
            engines = self.admin_status()["engines"]
            return sum(one["state"] == "ready" and one["load"] is not None for one in engines) == num_engines

        wait_until(are_linked, timeout_s, "all engines linked")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def key(self, tenant: str | None = None) -> str:
        """A new API key of a tenant; of the first one if none is named."""
        return self.key_of(tenant or self.config.tenants[0].name)

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(
        self, name: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes] | WarmProcess:
        environment = {
            **os.environ,
            "HEADRACE_REDIS_URL": self.redis_url,
            "HEADRACE_KEY_PEPPER": PEPPER,
            "HEADRACE_ADMIN_TOKEN": ADMIN_TOKEN,
            **self._environment,
            **(environment or {}),
        }
        arguments = (*arguments, "--config", str(self._config_file))
        process: subprocess.Popen[bytes] | WarmProcess
        with (self.directory / f"{name}.log").open("ab") as log:
            if self._fresh or not can_be_warm(environment):
                process = subprocess.Popen(
                    [sys.executable, "-m", "compose.cli", *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            else:
                process = start_warm(
                    "compose.cli",
                    *arguments,
                    environment=environment,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                )
        self.processes[name] = process
        return process


def fake_model(name: str = "fake", options: str = "", **fields: Any) -> dict[str, Any]:
    return {"name": name, "source": f"fake:{options}", **fields}
