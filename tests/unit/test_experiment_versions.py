"""`headrace experiment`: which versions of a route it tells of, and which routes are no experiments."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from typer.testing import CliRunner, Result

from compose.commands.experiment import app
from shared.config import RouteConfig, TenantConfig, VariantConfig
from shared.errors import ConfigError
from shared.experiment_figures import ExperimentRecord, RequestCounts, VariantFigures
from shared.redis_schema import PolicyRecord, RedisKeys, to_json


class World:
    """Figures and a policy in a real Valkey, and the command that reads them."""

    def __init__(self, client: Any, keys: RedisKeys) -> None:
        self.client = client
        self.keys = keys

    def publish(self, *routes: RouteConfig) -> None:
        record = PolicyRecord(1, "", [TenantConfig(name="acme")], list(routes))
        self.client.set(self.keys.policy, to_json(record))

    def count(self, route: str, version: int, *, at: float, **requests: int) -> None:
        """Requests by the variant that they were assigned."""
        record = ExperimentRecord(1.75e9, at)
        for variant, number in requests.items():
            record.variants[variant] = VariantFigures(
                assigned=RequestCounts(number, outcomes={"ok": number} if number else {})
            )
        self.client.hset(self.keys.experiment(route, version), "life", msgspec.json.encode(record))
        self.client.sadd(self.keys.experiments, f"{route}:{version}")

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    def report(self, *arguments: str) -> dict[str, Any]:
        ended = self.run("report", *arguments, "--json")
        assert ended.exit_code == 0, (ended.output, ended.exception)
        return json.loads(ended.stdout)

    def listed(self) -> set[tuple[str, str]]:
        ended = self.run("list")
        assert ended.exit_code == 0, (ended.output, ended.exception)
        return {(words[0], words[1]) for line in ended.stdout.splitlines()[1:] if (words := line.split())}


@pytest.fixture
def world(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    namespace = f"versions-{uuid.uuid4().hex[:8]}"
    (tmp_path / "headrace.toml").write_text(f'[redis]\nnamespace = "{namespace}"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_REDIS_URL", redis_url)
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield World(client, RedisKeys(namespace))


def route(version: int = 1, name: str = "chat", **weights: float) -> RouteConfig:
    split = [VariantConfig(variant=variant, model="m", weight=weight) for variant, weight in weights.items()]
    return RouteConfig(name=name, version=version, split=split)


def test_the_report_is_of_the_version_in_force_though_others_are_higher_and_newer(world: World) -> None:
    for version, at in ((1, 1.751e9), (2, 1.752e9), (7, 1.753e9)):
        world.count("chat", version, at=at, a=10, b=10)
    world.publish(route(2, a=1, b=1))  # 7 was tried, and taken back
    told = world.report("chat")
    assert (told["version"], told["is_in_force"], told["other_versions"]) == (2, True, [1, 7])
    told = world.report("chat", "--version", "7")
    assert (told["version"], told["is_in_force"], told["other_versions"]) == (7, False, [1, 2])
    assert (
        "Version 2 is in force; there are figures of 1, 7, too (--version)."
        in world.run("report", "chat").stdout
    )


def test_the_report_on_a_route_that_is_gone_is_of_the_version_that_was_asked_last(world: World) -> None:
    for version, at in ((3, 1.751e9), (1, 1.753e9), (2, 1.752e9)):
        world.count("chat", version, at=at, a=10, b=10)
    world.publish(route(1, "other", a=1, b=1))
    told = world.report("chat")
    assert (told["version"], told["is_in_force"], told["other_versions"]) == (1, False, [2, 3])


def test_a_version_in_force_that_nobody_has_asked_is_not_stood_in_for_by_another(world: World) -> None:
    world.count("chat", 1, at=1.751e9, a=10, b=10)
    world.publish(route(2, a=1, b=1))
    ended = world.run("report", "chat")
    assert isinstance(ended.exception, ConfigError), ended.output
    assert "no figures of 'chat', version 2, which is in force; there are those of --version 1" in str(
        ended.exception
    )


def test_what_only_has_a_fallback_or_a_shadow_is_not_listed(world: World) -> None:
    later = {"at": "2099-01-01T00:00:00Z", "weight": 1.0}
    ramp = VariantConfig.model_validate({"variant": "b", "model": "m", "weight": 0.0, "ramp": [later]})
    split, spare = route(name="split", a=9, b=1), route(name="spare", a=1, b=0)
    ramped = RouteConfig(name="ramped", split=[split.split[0], ramp])
    rolled_out = route(name="rolled-out", a=0, b=1)
    world.publish(split, spare, ramped, rolled_out)
    for name in ("split", "spare", "ramped", "gone-spare"):
        world.count(name, 1, at=1.751e9, a=10, b=0)
    for name in ("rolled-out", "gone"):
        world.count(name, 1, at=1.751e9, a=10, b=3)
    assert world.listed() == {(name, "1") for name in ("split", "ramped", "rolled-out", "gone")}
