"""headrace.toml that changes while gateways run: as one snapshot, or not at all and with a reason."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from prometheus_client import Gauge

from compose.run_directory import RunDirectory
from compose.stack_config import read_config
from compose.stack_plan import StackPlan
from gateway.breaker import RedisBreaker
from gateway.config_file import RELOADABLE_OPTIONS, ConfigFile, ConfigSource
from gateway.policy import PolicyStore
from shared.config import GatewayConfig, HeadraceConfig
from shared.redis_schema import RedisKeys
from tests.http_client import Answer, send
from tests.integration.test_admin import admin
from tests.stack import Stack, fake_model, wait_until

MODELS = [fake_model("a", "step_delay_ms=1"), fake_model("b", "step_delay_ms=1")]


def document(control: float = 1.0, treated: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {
        "redis": {"timeout_ms": 2000},
        "models": MODELS,
        "tenants": [{"name": "acme"}],
        "routes": [
            {
                "name": "chat",
                "split": [
                    {"variant": "control", "model": "a", "weight": control},
                    {"variant": "treated", "model": "b", "weight": treated},
                ],
            }
        ],
        **fields,
    }


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, json.loads(json.dumps(document()))) as stack:
        yield stack


def rewrite(stack: Stack, changed: dict[str, Any]) -> None:
    namespace = stack.config.redis.namespace
    redis = {"namespace": namespace, "timeout_ms": 2000}
    stack.rewrite_config({**json.loads(json.dumps(changed)), "redis": redis})


def ask(stack: Stack, key: str, **fields: Any) -> Answer:
    body = {"model": "chat", "prompt": "hi", "max_tokens": 4, **fields}
    return send(stack.url, "POST", "/v1/completions", body, key=key)


def test_weights_reload_under_load_without_a_failure_and_each_request_sees_one_version(stack: Stack) -> None:
    key, stop = stack.key(), threading.Event()
    first = stack.admin_status()["policy_version"]

    def ask_on() -> list[tuple[int, str]]:
        seen = []
        while not stop.is_set():
            answer = ask(stack, key)
            assert answer.status == 200, answer.data
            seen.append(
                (
                    int(answer.headers["x-headrace-policy-version"]),
                    answer.headers["x-headrace-variant"],
                )
            )
        return seen

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on) for _ in range(4)]
        try:
            for number in range(1, 4):
                is_control = number % 2 == 0
                rewrite(stack, document(*((1.0, 0.0) if is_control else (0.0, 1.0))))
                wanted = first + number
                wait_until(lambda each=wanted: stack.admin_status()["policy_version"] == each, 10, "it")
        finally:
            stop.set()
        seen = {each for one in asking for each in one.result()}
    variants = {0: "control", 1: "treated"}
    assert seen <= {(first + number, variants[number % 2]) for number in range(4)}
    assert {version for version, _ in seen} >= {first, first + 1, first + 2}
    assert any(each["action"] == "file.publish" for each in admin(stack, "GET", "/audit").json["data"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"tenants": [', "cannot read"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ("{}", "is empty"),
        ('{"tenants": [{"name": "acme", "max_concurency": 1}]}', "max_concurrency"),
        ('{"routes": [{"name": "r", "split": [{"variant": "v", "model": "c"}]}]}', "no model is named 'c'"),
    ],
    ids=["broken", "bottomless", "empty", "unknown key", "unknown model"],
)
def test_an_invalid_file_keeps_the_old_policy_and_says_why_once(
    stack: Stack, content: str, reason: str
) -> None:
    before = stack.admin_status()
    assert before["configuration"]["error"] is None
    stack.rewrite_config(content)
    error = wait_until(lambda: stack.admin_status()["configuration"]["error"], 5, "a reason")
    assert reason in error
    stack.kill("gateway", signal.SIGHUP)  # which makes it look once more
    stack.rewrite_config(content)
    after = stack.admin_status()
    assert (after["policy_version"], after["routes"]) == (before["policy_version"], before["routes"])
    assert after["configuration"]["loaded_at"] == before["configuration"]["loaded_at"]
    assert "headrace_config_reload_failed 1.0" in stack.get("/metrics")[1].decode()
    assert ask(stack, stack.key()).status == 200
    rewrite(stack, document(0.0, 1.0))
    wait_until(lambda: stack.admin_status()["configuration"]["error"] is None, 5, "a valid file")
    assert ask(stack, stack.key()).headers["x-headrace-variant"] == "treated"
    assert "headrace_config_reload_failed 0.0" in stack.get("/metrics")[1].decode()
    assert stack.log("gateway").count("is not put in force") == 1


def test_a_gateway_that_starts_beside_an_invalid_file_goes_on_with_what_was_published(stack: Stack) -> None:
    """As under `headrace up`, whose gateway is started from a copy of what the file once was."""
    user_file = stack.directory / "headrace.toml"

    def write(control: float, more: str = "") -> None:
        user_file.write_text(
            '[[tenants]]\nname = "acme"\n[[models]]\nname = "a"\nsource = "fake:"\n[[models]]\nname = "b"\n'
            f'source = "fake:"\n[[routes]]\nname = "chat"\nsplit = [{{ variant = "control", model = "a", '
            f'weight = {control} }}, {{ variant = "treated", model = "b", weight = {1 - control} }}]\n{more}'
        )

    write(0.0)
    stack.start_gateway("follower", "--follow", str(user_file))
    key = stack.key()
    wait_until(lambda: stack.get("/readyz")[0] == 200, 10, "readiness")
    assert ask(stack, key).headers["x-headrace-variant"] == "treated"  # the file counts, not the copy
    write(0.0, "nonsense = 1\n")
    stack.kill("follower")
    stack.start_gateway("follower", "--follow", str(user_file))
    wait_until(lambda: stack.get("/readyz")[0] == 200, 10, "readiness")
    assert ask(stack, key).headers["x-headrace-variant"] == "treated"
    assert "nonsense" in stack.admin_status()["configuration"]["error"]


async def test_a_fault_in_reading_keeps_the_old_policy_and_does_not_end_the_gateway(tmp_path: Path) -> None:
    """Whatever the fault: the next one is not known."""
    file, running = tmp_path / "headrace.toml", HeadraceConfig()
    file.write_text("")
    is_read = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(_: bool) -> HeadraceConfig:
        loop.call_soon_threadsafe(is_read.set)
        raise MemoryError("no room")

    async with redis.asyncio.Redis(port=9) as client:
        policy = PolicyStore(running, client, RedisKeys("never-asked"), RedisBreaker())
        config_file = ConfigFile(
            ConfigSource(file, load), running, policy, Gauge("failed", "", registry=None)
        )
        before = policy.current
        following = asyncio.create_task(config_file.follow())
        config_file.ask()
        await asyncio.wait_for(is_read.wait(), 10)
        config_file.ask()
        is_read.clear()
        await asyncio.wait_for(is_read.wait(), 10)
        assert not following.done()
        assert "MemoryError: no room" in (config_file.error or "")
        assert policy.current is before
        following.cancel()


@pytest.mark.parametrize(
    ("running", "may_start_empty"),
    [({}, True), ({"tenants": [{"name": "acme"}]}, False)],
    ids=["from an empty file", "from a copy of one that was not"],
)
async def test_only_a_gateway_that_starts_without_tenants_takes_an_empty_file(
    redis_url: str, tmp_path: Path, running: dict[str, Any], may_start_empty: bool
) -> None:
    file, config = tmp_path / "headrace.toml", HeadraceConfig.model_validate(running)
    file.write_text("# nothing\n")
    seen: asyncio.Queue[bool] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def load(may_be_empty: bool) -> HeadraceConfig:
        loop.call_soon_threadsafe(seen.put_nowait, may_be_empty)
        return read_config(file, may_be_empty=may_be_empty)

    async with redis.asyncio.Redis.from_url(redis_url) as client:
        policy = PolicyStore(config, client, RedisKeys(f"empty-{may_start_empty}"), RedisBreaker())
        config_file = ConfigFile(ConfigSource(file, load), config, policy, Gauge("failed", "", registry=None))
        await config_file.begin()
        assert await seen.get() is may_start_empty
        assert (config_file.error is None) is may_start_empty
        assert policy.current.tenants.keys() == {tenant.name for tenant in config.tenants}
        following = asyncio.create_task(config_file.follow())
        config_file.ask()
        assert await asyncio.wait_for(seen.get(), 10) is False
        following.cancel()


def test_options_reload_and_what_needs_a_restart_is_named(stack: Stack) -> None:
    key = stack.key()
    assert ask(stack, key, frobnicate=1).status == 400
    origin = {"Origin": "https://chat.example.com"}
    assert "access-control-allow-origin" not in send(stack.url, "GET", "/livez", headers=origin).headers
    options = {
        "unknown_fields": "ignore",
        "cors_allow_origins": ["https://chat.example.com"],
        "drain_timeout_s": 1.0,
    }
    tenants = [{"name": "acme", "models": ["chat", "c"]}]  # as the file has it: no reason to refuse the file
    rewrite(stack, document(gateway=options, models=[*MODELS, fake_model("c")], tenants=tenants))
    wait_until(lambda: ask(stack, key, frobnicate=1).status == 200, 5, "the option")
    allowed = send(stack.url, "GET", "/livez", headers=origin).headers["access-control-allow-origin"]
    assert allowed == "https://chat.example.com"
    document_served = send(stack.url, "GET", "/openapi.json").json
    assert "additionalProperties" not in document_served["components"]["schemas"]["CompletionBody"]
    warning = "a restart is needed for what has changed in models, gateway.drain_timeout_s"
    wait_until(lambda: warning in stack.log("gateway"), 5, "the warning")
    assert "c" not in stack.admin_status()["routes"]
    assert "the tenant 'acme': models: no route or model is named 'c'" in stack.log("gateway")


def test_every_option_that_is_said_to_reload_is_one() -> None:
    assert set(RELOADABLE_OPTIONS) <= set(GatewayConfig.model_fields)


def test_a_file_is_in_force_here_without_redis_and_published_when_it_is_back(own_redis: Any) -> None:
    redis_url, redis_process = own_redis
    with Stack(redis_url, {**json.loads(json.dumps(document())), "redis": {"timeout_ms": 100}}) as stack:
        assert admin(stack, "PUT", "/tenants/kept", {}).status == 201
        version = stack.admin_status()["policy_version"]
        key = stack.key()
        assert ask(stack, key).headers["x-headrace-variant"] == "control"
        redis_process.send_signal(signal.SIGSTOP)
        stack.rewrite_config(
            json.loads(json.dumps(document(0.0, 1.0)))
            | {"redis": {"namespace": stack.config.redis.namespace, "timeout_ms": 100}}
        )
        wait_until(lambda: ask(stack, key).headers.get("x-headrace-variant") == "treated", 10, "it, here")
        assert "kept" in stack.admin_status()["tenants"]
        redis_process.send_signal(signal.SIGCONT)
        wait_until(lambda: stack.admin_status()["policy_version"] == version + 1, 10, "its publication")
        assert "kept" in stack.admin_status()["tenants"]


def test_under_headrace_up_the_gateway_follows_the_user_s_own_file() -> None:
    """Seen from its command line: the supervisor's own tests start the whole of it."""
    directory = RunDirectory(Path("never-made"), -1, Path("never-made/s"))
    plan = StackPlan(HeadraceConfig(), directory, "redis://", "pepper", "token", Path("/etc/h.toml"), "m")
    command = plan.gateway(0).command
    assert command[command.index("--follow") + 1] == "/etc/h.toml"
    assert command[command.index("--follow-model") + 1] == "m"
    assert command[command.index("--config") + 1] != "/etc/h.toml"
