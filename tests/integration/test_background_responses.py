"""Responses that are made while nobody waits for them: by one gateway, and looked after by any."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from gateway.breaker import RedisBreaker
from gateway.openai.responses.background import BackgroundResponses
from gateway.openai.responses.identity import fresh_response_id
from gateway.openai.responses.store import LOST, ResponseStore
from shared.identifiers import TenantId
from shared.redis_client import connect_async
from shared.redis_schema import RESPONSE_LEASE_LIFETIME_S, RedisKeys, ResponseRecord
from tests.stack import Stack, fake_model, wait_until
from tests.valkey_server import running_valkey

SHORT: dict[str, Any] = {"model": "fake", "max_output_tokens": 40, "temperature": 0, "input": "hi"}
LONG: dict[str, Any] = {"model": "slow", "max_output_tokens": 2000, "temperature": 0, "input": "hi"}
DOCUMENT: dict[str, Any] = {
    "models": [fake_model(), fake_model("slow", "step_delay_ms=20")],
    "tenants": [{"name": "one"}, {"name": "two"}, {"name": "narrow", "max_concurrency": 1}],
    "gateway": {"responses_ttl_s": 1000, "max_stored_response_bytes": 20_000, "drain_timeout_s": 1.5},
}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    """With two gateways."""
    with Stack(redis_url, dict(DOCUMENT)) as stack:
        stack.start_gateway("second")
        stack.wait_ready()
        yield stack


def client_of(stack: Stack, gateway: int = 0, tenant: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.urls[gateway] + "/v1", api_key=stack.key(tenant), max_retries=0)


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return client_of(stack)


@pytest.fixture(scope="module")
def other_gateway(stack: Stack) -> openai.OpenAI:
    return client_of(stack, 1)


def ended(client: openai.OpenAI, response: Response) -> Response:
    return wait_until(
        lambda: (
            (now := client.responses.retrieve(response.id)).status not in ("queued", "in_progress") and now
        ),
        what="the end of the response",
    )


def begun(stack: Stack, client: openai.OpenAI, response: Response) -> None:
    wait_until(lambda: client.responses.retrieve(response.id).status == "in_progress")
    wait_until(lambda: stack.gauges()["running"], what="its work in the figures of the last gateway")


def is_idle(stack: Stack) -> bool:
    return not any(stack.gauges().values())


def test_a_response_in_the_background_says_what_any_other_says(client, other_gateway):
    asked = client.responses.create(**SHORT, background=True, metadata={"a": "b"})
    assert (asked.status, asked.background, asked.output, asked.usage) == ("queued", True, [], None)
    made = ended(other_gateway, asked)
    assert (made.status, made.background, made.metadata) == ("incomplete", True, {"a": "b"})
    whole = client.responses.create(**SHORT)
    assert made.output_text == whole.output_text != ""
    assert made.usage.output_tokens == whole.usage.output_tokens
    assert made.id == asked.id


def test_it_can_be_gone_on_from_once_it_has_ended(client):
    made = ended(client, client.responses.create(**SHORT, background=True))
    after_it = client.responses.create(**SHORT, previous_response_id=made.id)
    after_another = client.responses.create(**SHORT, previous_response_id=client.responses.create(**SHORT).id)
    assert after_it.output_text == after_another.output_text


def test_what_is_being_made_says_so_and_cannot_be_gone_on_from(stack, client, other_gateway):
    asked = client.responses.create(**LONG, background=True)
    begun(stack, other_gateway, asked)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**SHORT, previous_response_id=asked.id)
    assert (refused.value.param, refused.value.code) == (
        "previous_response_id",
        "previous_response_not_completed",
    )
    assert "in_progress" in refused.value.message
    client.responses.cancel(asked.id)


@pytest.mark.parametrize("gateway", [0, 1], ids=["its own", "another one"])
def test_it_can_be_cancelled_at_any_gateway(stack, client, gateway):
    asked = client.responses.create(**LONG, background=True)
    begun(stack, client, asked)
    cancelling = client_of(stack, gateway)
    cancelled = cancelling.responses.cancel(asked.id)
    assert (cancelled.id, cancelled.status) == (asked.id, "cancelled")
    wait_until(lambda: is_idle(stack), 10, "the end of the work")
    assert cancelling.responses.cancel(asked.id) == cancelled, "twice is as once"
    assert client.responses.retrieve(asked.id) == cancelled


def test_what_has_ended_is_not_cancelled_any_more(client):
    made = ended(client, client.responses.create(**SHORT, background=True))
    assert client.responses.cancel(made.id) == made


@pytest.mark.parametrize("gateway", [0, 1], ids=["its own", "another one"])
def test_what_is_deleted_is_not_made_any_further(stack, client, gateway):
    asked = client.responses.create(**LONG, background=True)
    begun(stack, client, asked)
    client_of(stack, gateway).responses.delete(asked.id)
    wait_until(lambda: is_idle(stack), 10, "the end of the work")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(asked.id)


def test_the_response_of_another_tenant_cannot_be_cancelled(stack, client):
    asked = client.responses.create(**LONG, background=True)
    with pytest.raises(openai.NotFoundError):
        client_of(stack, 1, "two").responses.cancel(asked.id)
    assert client.responses.cancel(asked.id).status == "cancelled"


def test_it_counts_against_its_tenants_concurrency_until_it_ends(stack):
    client = client_of(stack, 0, "narrow")
    asked = client.responses.create(**LONG, background=True)
    with pytest.raises(openai.RateLimitError):
        client.responses.create(**SHORT, background=True)
    client.responses.cancel(asked.id)

    def is_let_in() -> bool:
        try:
            return client.responses.create(**SHORT) is not None
        except openai.RateLimitError:
            return False

    wait_until(is_let_in, 10)


def test_what_cannot_be_stored_is_refused_at_once(stack, client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            **{**SHORT, "input": "x" * 3000 + "é" * 9000, "model": "fake"}, background=True
        )
    assert refused.value.param == "input"
    wait_until(lambda: is_idle(stack), 10)


def test_an_answer_that_is_too_long_to_be_stored_is_a_failure(client):
    asked = client.responses.create(**{**SHORT, "max_output_tokens": 3500, "top_logprobs": 5},
                                    include=["message.output_text.logprobs"], background=True)  # fmt: skip
    made = ended(client, asked)
    assert (made.status, made.error.code) == ("failed", "server_error")
    assert "too long" in made.error.message


def test_of_two_who_end_it_at_the_same_time_one_does(redis_url):
    async def race() -> None:
        client = connect_async(redis_url, 2000)
        store = ResponseStore(client, RedisKeys("race"), RedisBreaker(), lifetime_s=60, max_bytes=10_000)
        tenant, its_id = TenantId("one"), fresh_response_id()

        def record(status: str) -> ResponseRecord:
            return ResponseRecord({"id": its_id, "status": status, "usage": None}, [])

        await store.begin(tenant, record("queued"))
        statuses = ["completed", "cancelled"]
        has_ended = await asyncio.gather(*(store.end(tenant, record(status)) for status in statuses))
        assert sorted(has_ended) == [False, True]
        kept = await store.get(tenant, its_id)
        assert kept is not None
        assert kept.response["status"] == statuses[has_ended.index(True)]
        assert await store.extend_leases([(tenant, its_id)]) == [False]
        await client.aclose()

    asyncio.run(race())


def test_who_cancels_at_its_own_gateway_ends_its_task_at_once_and_not_with_its_lease(redis_url):
    async def cancel() -> None:
        client = connect_async(redis_url, 2000)
        store = ResponseStore(client, RedisKeys("soon"), RedisBreaker(), lifetime_s=60, max_bytes=10_000)
        ours = BackgroundResponses(store)  # nobody runs keep_leases
        tenant, its_id, has_begun = TenantId("one"), fresh_response_id(), asyncio.Event()

        async def make() -> None:
            await ours.begin(tenant, ResponseRecord({"id": its_id, "status": "queued", "usage": None}, []))
            has_begun.set()
            await asyncio.Event().wait()

        making = asyncio.create_task(make())
        await has_begun.wait()
        ours.cancel(TenantId("two"), its_id)
        ours.cancel(tenant, its_id)
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await making
        ours.cancel(tenant, its_id)  # it is forgotten, so this is for nobody
        await client.aclose()

    asyncio.run(cancel())


def test_one_that_ends_while_redis_is_frozen_is_stored_after_that(tmp_path):
    with (
        running_valkey(tmp_path) as url,
        Stack(url, {"models": [fake_model(options="step_delay_ms=10")]}) as stack,
    ):
        client = client_of(stack, tenant="default")
        asked = client.responses.create(**SHORT, background=True)
        begun(stack, client, asked)
        pid = stack.redis.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: stack.log("gateway").count(f"how {asked.id} ended is not stored yet") >= 2)
        finally:
            os.kill(pid, signal.SIGCONT)

        def is_stored() -> bool:
            try:
                return client.responses.retrieve(asked.id).status == "incomplete"
            except openai.InternalServerError:
                return False

        wait_until(is_stored)


@pytest.fixture(scope="module")
def doomed(redis_url: str) -> Iterator[Stack]:
    """With three gateways, of which tests may take the first two, and an engine to take."""
    document = {
        **DOCUMENT,
        "models": [fake_model("slow", "step_delay_ms=20"), fake_model("mortal", "step_delay_ms=20")],
    }
    with Stack(redis_url, document) as stack:
        stack.start_gateway("second")
        stack.start_gateway("third")
        stack.wait_ready()
        yield stack


def test_one_whose_gateway_has_died_is_told_as_failed(doomed):
    owner, survivor = client_of(doomed, 0), client_of(doomed, 2)
    asked = owner.responses.create(**LONG, background=True)
    begun(doomed, survivor, asked)
    doomed.kill("gateway")
    lease = doomed.keys.response_lease(TenantId("one"), asked.id)
    assert 0 < doomed.redis.ttl(lease) <= RESPONSE_LEASE_LIFETIME_S
    doomed.redis.delete(lease)  # as by its time: nobody extends it now
    failed = survivor.responses.retrieve(asked.id)
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", LOST)
    assert survivor.responses.cancel(asked.id) == failed
    wait_until(lambda: is_idle(doomed), 10)


def test_a_gateway_that_drains_gives_them_its_time_and_says_of_the_rest_that_they_failed(doomed):
    owner, survivor = client_of(doomed, 1), client_of(doomed, 2)
    short = owner.responses.create(**{**LONG, "max_output_tokens": 16}, background=True)
    long = owner.responses.create(**LONG, background=True)
    begun(doomed, survivor, long)
    doomed.kill("second", signal.SIGTERM)
    assert doomed.processes["second"].wait(15) == 0
    assert survivor.responses.retrieve(short.id).status == "incomplete"
    failed = survivor.responses.retrieve(long.id)
    assert (failed.status, failed.error.message) == ("failed", "The server is shutting down.")
    wait_until(lambda: is_idle(doomed), 10)
    assert "Traceback" not in doomed.log("second")


def test_one_whose_engine_has_died_has_failed(doomed):
    client = client_of(doomed, 2)
    asked = client.responses.create(**{**LONG, "model": "mortal"}, background=True)
    begun(doomed, client, asked)
    doomed.kill("mortal-0")
    made = ended(client, asked)
    assert (made.status, made.error.code) == ("failed", "server_error")
    assert "interrupted" in made.error.message
    assert made.output[0].status == "incomplete"


def test_where_nothing_is_stored_nothing_runs_in_the_background(redis_url):
    with Stack(redis_url, {"models": [fake_model()], "gateway": {"responses_ttl_s": 0}}) as stack:
        with pytest.raises(openai.BadRequestError) as refused:
            client_of(stack, tenant="default").responses.create(**SHORT, background=True)
        assert refused.value.param == "background"
