"""A registry that holds nonsense: one bad record concerns nobody but its engine."""

from __future__ import annotations

from shared.identifiers import EngineEpoch, EngineId
from shared.redis_schema import EngineRecord, to_json
from tests.http_client import send
from tests.stack import Stack, wait_until

GOOD_REQUEST = {"model": "fake", "prompt": "hi", "max_tokens": 1}


def test_records_that_make_no_sense_do_not_hide_the_other_engines(redis_url):
    with Stack(redis_url) as stack:
        for name, value in (
            ("garbage", b"not json"),
            ("wrong type", b'{"engine_id": 7}'),
            ("bad-address", record("bad-address", "no address at all")),
            ("nobody", record("nobody", "ipc:///nowhere/at/all.sock")),
        ):
            stack.redis.set(stack.keys.engine(EngineId(name)), value)
            stack.redis.sadd(stack.keys.engines, name)
        wait_until(lambda: "no address at all" in stack.log("gateway"), 5, "a line about the address")
        stack.kill("fake-0")
        stack.processes["fake-0"].wait()
        stack.start_engine("fake", 0)
        key = stack.key()
        wait_until(
            lambda: send(stack.url, "POST", "/v1/completions", GOOD_REQUEST, key=key).status == 200,
            20,
            "the engine that came later",
        )
        assert stack.log("gateway").count("not json") + stack.log("gateway").count("garbage") < 5


def record(name: str, address: str) -> bytes:
    return to_json(EngineRecord(EngineId(name), EngineEpoch("e"), address, "other", "ready", pid=1))
