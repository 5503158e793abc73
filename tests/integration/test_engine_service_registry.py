"""The engine's record in Redis: there while the engine is, and nobody else's business."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from shared.engine_registry import Registry
from shared.identifiers import EngineEpoch, EngineId
from shared.messages import Heartbeat
from shared.redis_client import connect
from shared.redis_schema import EngineRecord, RedisKeys, from_json, to_json
from tests.integration.engine_peer import engine, peer, stop, wait_until

ENGINE = EngineId("model-0")


@pytest.fixture
def keys() -> RedisKeys:
    return RedisKeys(f"test-{secrets.token_hex(4)}")


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url, timeout_ms=2000) as client:
        yield client


def flags(redis_url: str, keys: RedisKeys) -> list[str]:
    return ["--redis-url", redis_url, "--namespace", keys.engines.removesuffix(":engines")]


def record_of(client: redis.Redis, keys: RedisKeys) -> EngineRecord | None:
    value = client.get(keys.engine(ENGINE))
    assert value is None or isinstance(value, bytes)
    return None if value is None else from_json(EngineRecord, value)


def wait_for_state(client: redis.Redis, keys: RedisKeys, state: str) -> EngineRecord:
    def is_there() -> bool:
        record = record_of(client, keys)
        return record is not None and record.state == state

    wait_until(is_there)
    record = record_of(client, keys)
    assert record is not None
    return record


def test_the_record_leads_to_the_engine_and_goes_with_it(
    redis_url: str, client: redis.Redis, keys: RedisKeys
) -> None:
    slow = "fake:step_delay_ms=50"
    with engine("tcp://127.0.0.1:0", *flags(redis_url, keys), source=slow) as process:
        record = wait_for_state(client, keys, "ready")
        assert record.pid == process.pid
        assert not record.address.endswith(":0")
        assert client.sismember(keys.engines, ENGINE)
        assert 0 < client.ttl(keys.engine(ENGINE)) <= 5
        with peer(record.address) as gateway:
            assert gateway.hello().epoch == record.epoch
            gateway.submit("r", max_tokens=40)
            gateway.wait_for(Heartbeat, lambda beat: beat.load.num_running == 1)
            process.send_signal(signal.SIGTERM)
            draining = wait_for_state(client, keys, "draining")
            assert draining.load is not None
            gateway.wait_until_finished("r")
        assert process.wait(10) == 0
        assert record_of(client, keys) is None
        assert not client.sismember(keys.engines, ENGINE)


def test_a_record_that_another_life_has_written_stays(
    redis_url: str, client: redis.Redis, keys: RedisKeys
) -> None:
    ours = EngineRecord(ENGINE, EngineEpoch("ours"), "ipc:///ours", "model", "ready", 1)
    registry = Registry(connect(redis_url, timeout_ms=2000), keys, lambda: ours, refresh_interval_s=600)
    registry.start()
    assert wait_for_state(client, keys, "ready") == ours
    successor = EngineRecord(ENGINE, EngineEpoch("next"), "ipc:///next", "model", "ready", 2)
    client.set(keys.engine(ENGINE), to_json(successor))
    registry.stop()
    assert record_of(client, keys) == successor
    assert client.sismember(keys.engines, ENGINE)


def test_an_engine_serves_without_a_redis_that_answers(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e.sock"
    with engine(address, "--redis-url", "redis://127.0.0.1:1/0", source="fake:") as process:
        with peer(address) as gateway:
            gateway.hello()
            gateway.submit("r")
            gateway.wait_until_finished("r")
            gateway.wait_for(Heartbeat)
            gateway.wait_for(Heartbeat)
            gateway.wait_for(Heartbeat)
        assert stop(process) == 0
        assert process.stderr is not None
        assert process.stderr.read().count("does not take this engine's record") == 1
