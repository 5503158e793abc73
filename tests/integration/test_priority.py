"""`priority` in a body: for tenants that may, and of effect in the engine's queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http_client import send
from tests.stack import Stack, fake_model, wait_until

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/v1/completions": {"model": "fake", "prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"model": "fake", "input": "hi", "max_output_tokens": 16},
    "/v1/embeddings": {"model": "vectors", "input": "hi"},
    "/v1/score": {"model": "vectors", "text_1": "hi", "text_2": "ho"},
    "/v1/rerank": {"model": "vectors", "query": "hi", "documents": ["ho"]},
}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    document: dict[str, Any] = {
        "models": [
            fake_model(options="step_delay_ms=10", max_num_seqs=1),
            fake_model("vectors", runner="pooling"),
        ],
        "tenants": [{"name": "may", "may_set_priority": True}, {"name": "may-not"}],
    }
    with Stack(redis_url, document) as stack:
        yield stack


@pytest.mark.parametrize("path", BODIES)
def test_only_tenants_that_may_set_a_priority_can(stack: Stack, path: str) -> None:
    def ask(tenant: str, priority: int) -> Any:
        return send(stack.url, "POST", path, {**BODIES[path], "priority": priority}, key=stack.key(tenant))

    refused = ask("may-not", 1)
    assert (refused.status, refused.error["code"], refused.error["param"]) == (
        403,
        "permission_denied",
        "priority",
    )
    assert ask("may-not", 0).status == 200
    assert ask("may", 1).status == 200
    assert ask("may", -1).status == 200


def test_what_is_of_a_higher_class_is_answered_first(stack: Stack) -> None:
    key, answered = stack.key("may"), queue.SimpleQueue[int]()

    def ask(priority: int, max_tokens: int) -> None:
        body = {**CHAT, "priority": priority, "max_tokens": max_tokens}
        assert send(stack.url, "POST", "/v1/chat/completions", body, key=key).status == 200
        answered.put(priority)

    threads = []
    for priority in (0, 2, 1):  # the first one runs; the others wait for it
        threads.append(threading.Thread(target=ask, args=(priority, 60 if priority == 0 else 1)))
        threads[-1].start()
        wait_until(lambda: sum(stack.gauges()[kind] for kind in ("running", "waiting")) == len(threads))
    for thread in threads:
        thread.join()
    assert [answered.get() for _ in threads] == [0, 1, 2]
