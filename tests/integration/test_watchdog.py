"""An engine that makes no progress says so, and ends, rather than look healthy for ever."""

from __future__ import annotations

import json
import time

from tests.http_client import send
from tests.stack import Stack, fake_model, wait_until


def test_a_step_that_hangs_ends_the_engine_and_the_requests_with_it(redis_url):
    model = fake_model(options="step_delay_ms=60000", watchdog_timeout_s=1)
    with Stack(redis_url, {"models": [model]}) as stack:
        began = time.monotonic()
        body = {"model": "fake", "prompt": "hi", "max_tokens": 2}
        answer = send(stack.url, "POST", "/v1/completions", body, key=stack.key())
        assert answer.status == 502
        assert json.loads(answer.data)["error"]["code"] == "upstream_error"
        assert time.monotonic() - began < 10
        assert stack.processes["fake-0"].wait(15) == 1
        assert "no step was done" in stack.log("fake-0")
        wait_until(lambda: stack.get("/health")[0] == 503, 5, "honest health")


def test_an_idle_engine_and_one_with_slow_steps_are_left_alone(redis_url):
    model = fake_model(options="step_delay_ms=600", watchdog_timeout_s=1)
    with Stack(redis_url, {"models": [model]}) as stack:
        time.sleep(2)
        body = {"model": "fake", "prompt": "hi", "max_tokens": 4}
        assert send(stack.url, "POST", "/v1/completions", body, key=stack.key()).status == 200
        assert stack.processes["fake-0"].poll() is None
