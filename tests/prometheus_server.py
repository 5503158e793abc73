"""A real Prometheus for tests, where it is installed; and its command for checking rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compose.die_with_parent import bound_to_this_process
from compose.valkey import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="no `prometheus` on the PATH (Debian: apt-get install prometheus)",
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="no `promtool` on the PATH (Debian: in the package prometheus)",
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def firing(self) -> set[tuple[str, str]]:
        """Names of the alerts that fire, each with the model or route that it is about, if any."""
        return {
            (labels["alertname"], labels.get("model_name", labels.get("route", "")))
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing"
            for labels in [alert["labels"]]
        }

    def value(self, query: str) -> float | None:
        found = self._get(f"query?query={urllib.parse.quote(query)}")["result"]
        return float(found[0]["value"][1]) if found else None

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=10) as response:
            document: dict[str, Any] = json.loads(response.read())
        assert document["status"] == "success", document
        data: dict[str, Any] = document["data"]
        return data


@contextmanager
def running_prometheus(folder: Path, rules: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Scrapes and evaluates every second. `targets`: host:port."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "gateway", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(bound_to_this_process(command), stdout=log, stderr=log)
    try:
        _wait_ready(f"http://127.0.0.1:{port}/-/ready", process, folder / "prometheus.log")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(20)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError(f"Prometheus is not ready:\n{log.read_text(errors='replace')}")
