"""The container set-up: a valid Compose file, Dockerfiles that name files that exist, nothing privileged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared.config import load_config

REPOSITORY = Path(__file__).parents[2]
COMPOSE_FILE = REPOSITORY / "compose" / "docker-compose.yml"
DOCKERFILES = sorted((REPOSITORY / "compose").glob("Dockerfile.*"))


def compose_program() -> list[str]:
    """`docker compose`, or the plugin's program alone, which is all that `config` needs."""
    downloaded = REPOSITORY / ".venv" / "docker-compose"
    if downloaded.exists():
        return [str(downloaded)]
    if shutil.which("docker"):
        plugin = ["docker", "compose"]
        if subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0:
            return plugin
    message = "no Docker Compose v2 here; `make compose-plugin` fetches it"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def compose(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        [*compose_program(), "-f", str(COMPOSE_FILE), *arguments],
        capture_output=True,
        text=True,
        env=clean | environment,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """As Compose understands the file, with every default filled in."""
    shown = compose("config", "--format", "json")
    assert shown.returncode == 0, shown.stderr
    found: dict[str, Any] = json.loads(shown.stdout)["services"]
    return found


def test_the_file_is_clean() -> None:
    checked = compose("config", "-q")
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_service_is_confined_and_checked(services: dict[str, Any]) -> None:
    assert sorted(services) == ["engine", "gateway", "redis"]
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["init"], name
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        assert "start_interval" not in service["healthcheck"], "needs a newer engine than many have"
        assert not service.get("privileged"), name


def test_only_the_gateway_is_reachable_and_only_from_this_machine(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if service.get("ports")] == ["gateway"]
    (port,) = services["gateway"]["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "8080", 8080)
    chosen = json.loads(compose("config", "--format", "json", PORT="9000").stdout)
    assert chosen["services"]["gateway"]["ports"][0]["published"] == "9000"


def test_services_start_after_redis_and_stop_after_their_drain(services: dict[str, Any]) -> None:
    config = load_config(REPOSITORY / "compose" / "headrace.docker.toml")
    for name in ("engine", "gateway"):
        assert services[name]["depends_on"]["redis"]["condition"] == "service_healthy"
        grace_s = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace_s > config.gateway.drain_timeout_s


def test_a_redis_password_reaches_both_sides() -> None:
    shown = json.loads(compose("config", "--format", "json", REDIS_PASSWORD="abc123").stdout)["services"]
    assert shown["redis"]["environment"]["REDIS_PASSWORD"] == "abc123"
    for name in ("engine", "gateway"):
        assert shown[name]["environment"]["HEADRACE_REDIS_URL"] == "redis://:abc123@redis:6379/0"


def test_the_engine_runs_a_configured_model(services: dict[str, Any]) -> None:
    config = load_config(REPOSITORY / "compose" / "headrace.docker.toml")
    (flag,) = [part for part in services["engine"]["command"] if part.startswith("--model=")]
    name = config.model(flag.removeprefix("--model=")).name
    assert f"--require-ready={name}-$$HOSTNAME" in services["engine"]["healthcheck"]["test"][1]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_exists_and_runs_as_nobody_special(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert text.count("ARG BASE_IMAGE=") == 1
    assert "FROM ${BASE_IMAGE}" in text
    assert not text.startswith("# syntax="), "fetches a frontend from a registry"
    assert "<<" not in text, "heredocs need a newer BuildKit than many have"
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (REPOSITORY / source).exists(), f"{dockerfile.name} copies {source}"


def test_the_gateway_image_has_no_torch() -> None:
    text = (REPOSITORY / "compose" / "Dockerfile.gateway").read_text()
    (extras,) = re.findall(r"'\.\[(.+?)\]'", text)
    assert extras == "gateway"
    assert not re.search(r"^COPY (engine_service|kernels)", text, re.MULTILINE)
