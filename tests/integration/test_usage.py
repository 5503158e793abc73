"""Usage rows: one for each request, however it ends, with what its client was told."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from compose.cli import app
from gateway.breaker import RedisBreaker
from gateway.usage.outlet import PlaceUnavailableError
from gateway.usage.stream import UsageStream
from shared.api_keys import ApiKeyStore
from shared.errors import ConfigError
from shared.identifiers import TenantId, fresh_gateway_id
from shared.redis_client import connect_async
from shared.redis_schema import USAGE_BATCH_LIFETIME_S, RedisKeys
from shared.usage import UsageRecord
from tests.http_client import send
from tests.stack import ADMIN_TOKEN, PEPPER, Stack, fake_model, wait_until
from tests.unit.test_usage_outlet import row

DOCUMENT: dict[str, Any] = {
    "models": [
        fake_model("fake"),
        fake_model("slow", "step_delay_ms=20"),
        fake_model("doomed", "step_delay_ms=20"),
        fake_model("mortal", "die_at_step=8"),
        fake_model("embedder", runner="pooling"),
    ],
    "tenants": [
        {"name": "acme"},
        {"name": "narrow", "requests_per_minute": 1, "burst": 1},
        {"name": "daily", "tokens_per_day": 1_000_000},
    ],
    "redis": {"timeout_ms": 2000},  # these tests are not about a machine that has no time
}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usage") / "usage.sqlite"


@pytest.fixture(scope="module")
def stack(redis_url: str, database: Path) -> Iterator[Stack]:
    """With two gateways, which share a file."""
    document = json.loads(json.dumps(DOCUMENT)) | {"usage": {"sqlite": str(database)}}
    with Stack(redis_url, document) as stack:
        stack.start_gateway("second")
        stack.wait_ready()
        yield stack


def rows(stack: Stack) -> list[UsageRecord]:
    entries = stack.redis.xrange(stack.keys.usage)
    return [msgspec.json.decode(fields[b"row"], type=UsageRecord) for _, fields in entries]


def row_of(stack: Stack, request_id: str) -> UsageRecord:
    """The only one of that request, which comes within a second."""
    found = wait_until(
        lambda: [row for row in rows(stack) if row.request_id == request_id], 5, f"a row of {request_id}"
    )
    assert len(found) == 1
    return found[0]


def post(stack: Stack, key: str, path: str, request_id: str, body: Any, gateway: int = 0) -> Any:
    headers = {"x-request-id": request_id}
    return send(stack.urls[gateway], "POST", path, body, key=key, headers=headers)


def completion(model: str = "fake", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": 5, "temperature": 0, **fields}


USER = {"role": "user", "content": "hi"}


def test_an_answer_s_row_says_whose_it_was_and_how_it_went(stack: Stack) -> None:
    answer = post(stack, stack.key("acme"), "/v1/completions", "whole", completion())
    kept = row_of(stack, "whole")
    usage = answer.json["usage"]
    assert (kept.input_tokens, kept.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (kept.tenant, kept.operation, kept.route, kept.model) == (
        "acme", "text_completion", "fake", "fake",
    )  # fmt: skip
    assert (kept.outcome, kept.status, kept.error_code, kept.is_streamed) == ("ok", 200, None, False)
    assert (kept.response_id, kept.engine_id) == (answer.json["id"], answer.headers["x-headrace-engine"])
    assert kept.variant == kept.assigned_variant == answer.headers["x-headrace-variant"]
    assert kept.key_id.startswith("key_")
    assert kept.finish_reasons == ["length"]
    assert 0 < kept.time_to_first_token_s <= kept.duration_s < 30


def test_a_stream_and_a_response_in_the_background_have_their_tokens_too(stack: Stack) -> None:
    key = stack.key("acme")
    body = completion(stream=True, max_tokens=7)
    assert post(stack, key, "/v1/completions", "stream", body).status == 200
    kept = row_of(stack, "stream")
    assert (kept.outcome, kept.output_tokens, kept.is_streamed) == ("ok", 7, True)
    asked = {"model": "fake", "input": "hi", "max_output_tokens": 9, "background": True}
    response = post(stack, key, "/v1/responses", "background", asked)
    assert response.json["status"] == "queued"
    kept = row_of(stack, "background")
    assert (kept.outcome, kept.output_tokens, kept.response_id) == ("ok", 9, response.json["id"])


def test_embeddings_have_input_tokens_only(stack: Stack) -> None:
    answer = post(
        stack, stack.key("acme"), "/v1/embeddings", "vectors", {"model": "embedder", "input": ["a b", "c"]}
    )
    kept = row_of(stack, "vectors")
    assert (kept.input_tokens, kept.output_tokens) == (answer.json["usage"]["prompt_tokens"], 0)
    assert (kept.operation, kept.outcome) == ("embeddings", "ok")


def test_a_refusal_by_a_limit_has_a_row_without_tokens(stack: Stack) -> None:
    key = stack.key("narrow")
    assert post(stack, key, "/v1/completions", "allowed", completion()).status == 200
    assert post(stack, key, "/v1/completions", "refused", completion()).status == 429
    kept = row_of(stack, "refused")
    assert (kept.outcome, kept.status, kept.error_code) == ("refused", 429, "rate_limit_exceeded")
    assert (kept.input_tokens, kept.output_tokens, kept.engine_id) == (0, 0, None)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", completion("no such model"), 404, "model_not_found"),
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", completion(max_tokens="many"), 400, "invalid_value"),
        ("/v1/messages", {"model": "none", "messages": [USER], "max_tokens": 1}, 404, "model_not_found"),
        ("/v1/embeddings", {"model": "none", "input": "a"}, 404, "model_not_found"),
    ],
)
def test_who_is_refused_before_a_route_is_known_has_a_row_without_one(
    stack: Stack, path: str, body: Any, status: int, code: str | None
) -> None:
    request_id = f"lost-{uuid.uuid4().hex}"
    assert post(stack, stack.key("acme"), path, request_id, body).status == status
    kept = row_of(stack, request_id)
    assert (kept.outcome, kept.status, kept.error_code) == ("refused", status, code)
    assert (kept.tenant, kept.key_id[:4]) == ("acme", "key_")
    assert (kept.route, kept.variant, kept.model, kept.input_tokens) == ("", "", "", 0)
    assert 'route=""' not in stack.get("/metrics")[1].decode()


def test_whom_nobody_knows_has_no_row(stack: Stack) -> None:
    assert post(stack, "hr-unknown", "/v1/completions", "stranger", completion()).status == 401
    assert post(stack, stack.key("acme"), "/v1/completions", "behind-it", completion()).status == 200
    row_of(stack, "behind-it")
    assert not [row for row in rows(stack) if row.request_id == "stranger"]


def test_a_gateway_that_is_killed_takes_no_rows_but_those_of_its_last_moments(stack: Stack) -> None:
    """Half a second by the design; here twice that, for a machine that has no time."""
    others_url = stack.url
    url = stack.start_gateway("short-lived")
    try:
        wait_until(lambda: stack.get("/readyz")[0] == 200, 30, "readiness")
        key, answered_at = stack.key("acme"), dict[str, float]()
        slowly = completion("slow", max_tokens=2)  # so few that no batch is full before its time
        began = time.monotonic()
        while time.monotonic() < began + 1.8:
            request_id = f"short-{len(answered_at)}"
            headers = {"x-request-id": request_id}
            answer = send(url, "POST", "/v1/completions", slowly, key=key, headers=headers)
            assert answer.status == 200
            answered_at[request_id] = time.monotonic()
        stack.kill("short-lived")
        killed_at = time.monotonic()
    finally:
        stack.url = others_url
        stack.urls.remove(url)
    stack.processes["short-lived"].wait()
    due = {request_id for request_id, moment in answered_at.items() if moment < killed_at - 1.0}
    assert len(due) > 5
    written = dict[str, float]()  # how long after its request's end each row was in Redis
    for entry_id, fields in stack.redis.xrange(stack.keys.usage):
        kept = msgspec.json.decode(fields[b"row"], type=UsageRecord)
        at_s = int(entry_id.partition(b"-")[0]) / 1000
        written[kept.request_id] = at_s - kept.arrived_at - kept.duration_s
    assert due <= set(written)
    assert max(written[request_id] for request_id in due) < 1.0


async def test_a_client_that_leaves_has_what_was_computed_for_it(stack: Stack) -> None:
    headers = {"Authorization": f"Bearer {stack.key('acme')}", "x-request-id": "left"}
    body = completion("slow", stream=True, max_tokens=500)
    async with (
        aiohttp.ClientSession(stack.urls[0], headers=headers) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        for _ in range(6):
            await response.content.readline()
    kept = await asyncio.to_thread(row_of, stack, "left")
    assert (kept.outcome, kept.status) == ("aborted", 499)
    assert 1 <= kept.output_tokens < 100
    assert kept.input_tokens > 0


async def test_a_stream_whose_engine_dies_is_a_failure_with_what_was_told(stack: Stack) -> None:
    headers = {"Authorization": f"Bearer {stack.key('acme')}", "x-request-id": "died"}
    body = completion("doomed", stream=True, max_tokens=500)
    async with (
        aiohttp.ClientSession(stack.urls[0], headers=headers) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        await response.content.readline()
        stack.kill("doomed-0")
        assert b'"error"' in await response.content.read()
    kept = await asyncio.to_thread(row_of, stack, "died")
    assert (kept.outcome, kept.status, kept.error_code) == ("failed", 502, "upstream_error")
    assert kept.output_tokens >= 1


def test_a_failure_instead_of_a_whole_answer_costs_nothing_though_there_were_tokens(stack: Stack) -> None:
    accounts, *_ = stack.keys.limit_state(TenantId("daily"))

    def used_today() -> int:
        return int(float(stack.redis.hget(accounts, "tenant tokens_per_day").split()[1]))

    key = stack.key("daily")
    answer = post(stack, key, "/v1/completions", "answered", completion()).json
    used = answer["usage"]["total_tokens"]
    wait_until(lambda: used_today() == used, 5, "what the answer has cost")
    assert post(stack, key, "/v1/completions", "mortal", completion("mortal", max_tokens=100)).status == 502
    kept = row_of(stack, "mortal")
    assert (kept.outcome, kept.input_tokens, kept.output_tokens) == ("failed", 0, 0)
    assert kept.time_to_first_token_s is not None  # by the engine; its client was told none
    wait_until(lambda: used_today() == used, 5, "what was reserved is given back")


# ------------------------------------------------------------------------------------------ sums


def headrace_usage(
    stack: Stack,
    *arguments: str,
    config: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> Result:
    file = stack.directory / "usage.json"
    document = config or {"redis": {"namespace": stack.config.redis.namespace}}
    file.write_text(json.dumps(document))
    environment = environment or {"HEADRACE_REDIS_URL": stack.redis_url}
    return CliRunner().invoke(app, ["usage", "--config", str(file), *arguments], env=environment)


def test_sums_over_the_admin_api_are_those_of_the_file(stack: Stack, database: Path) -> None:
    key = stack.key("acme")
    for number in range(3):
        assert post(stack, key, "/v1/completions", f"summed-{number}", completion()).status == 200
    of_file = {"usage": {"sqlite": str(database)}}
    remote = {"HEADRACE_URL": stack.url, "HEADRACE_ADMIN_TOKEN": ADMIN_TOKEN}
    for arguments in (
        ("--by", "tenant,model,outcome,hour"),
        ("--by", "", "--tenant", "acme", "--since", "1h", "--with-shadow"),
        ("--until", "2020-01-01"),
    ):

        def are_equal(arguments: tuple[str, ...] = arguments) -> bool:
            """Once the last rows of other tests are written."""
            asked = headrace_usage(stack, *arguments, "--format", "json", environment=remote)
            read = headrace_usage(stack, *arguments, "--format", "json", config=of_file)
            assert asked.exit_code == 0, (asked.output, asked.exception)
            return read.exit_code == 0 and sums(asked) == sums(read)

        wait_until(are_equal, 10, f"equal sums with {arguments}")


def sums(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


async def test_sums_are_what_clients_were_told_from_redis_as_from_the_file(
    stack: Stack, database: Path
) -> None:
    tenant = "acme"
    key = stack.key(tenant)
    known = ApiKeyStore(stack.redis, stack.keys, PEPPER.encode()).of_secret(key)
    assert known is not None
    key_id = known.key_id
    told: Counter[str] = Counter()

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        streams = number % 3 == 0
        body = completion(prompt="word " * (number % 7 + 1), max_tokens=number % 5 + 1, stream=streams)
        if streams:
            body["stream_options"] = {"include_usage": True}
        async with session.post(f"{stack.urls[number % 2]}/v1/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
        documents = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        usage = json.loads(documents[-1] if streams else text)["usage"]
        told["requests"] += 1
        told["input_tokens"] += usage["prompt_tokens"]
        told["output_tokens"] += usage["completion_tokens"]
        told["cached_tokens"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        await asyncio.gather(*(ask(session, number) for number in range(60)))

    def of_file() -> list[dict[str, Any]]:
        of_file = {"usage": {"sqlite": str(database)}}
        return sums(headrace_usage(stack, "--key", key_id, "--by", "", "--format", "json", config=of_file))

    def of_redis() -> list[dict[str, Any]]:
        return sums(headrace_usage(stack, "--key", key_id, "--by", "", "--format", "json"))

    for source in (of_redis, of_file):
        await asyncio.to_thread(wait_until, lambda each=source: each()[0]["requests"] >= 60, 10, "all rows")
        assert {name: source()[0][name] for name in told} == told
    by_tenant = sums(
        headrace_usage(stack, "--tenant", tenant, "--by", "tenant,model,day", "--format", "json")
    )
    assert {each["model"] for each in by_tenant} >= {"fake", "slow", "embedder"}
    table = headrace_usage(stack, "--tenant", "narrow", "--since", "1h")
    assert "narrow" in table.stdout
    lines = headrace_usage(stack, "--key", key_id, "--rows", "--format", "csv").stdout.splitlines()
    assert len(lines) == 61
    assert sums(headrace_usage(stack, "--until", "2020-01-01", "--by", "", "--format", "json"))[0] == {
        "requests": 0, "input_tokens": 0, "cached_tokens": 0, "output_tokens": 0,
        "errors": 0, "refused": 0, "aborted": 0,
    }  # fmt: skip


def test_wrong_options_are_told(stack: Stack, tmp_path: Path) -> None:
    for arguments, name in (
        (["--by", "colour"], "colour"),
        (["--since", "yesterday"], "--since"),
        (["--format", "parquet"], "--output"),
    ):
        result = headrace_usage(stack, *arguments)
        assert isinstance(result.exception, ConfigError)
        assert name in result.exception.message


def test_parquet_holds_the_same_rows_or_says_what_it_needs(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "usage.parquet"
    result = headrace_usage(stack, "--rows", "--format", "parquet", "--output", str(file))
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        assert isinstance(result.exception, ConfigError)
        assert "headrace[parquet]" in result.exception.message
        assert not file.exists()
    else:
        assert result.exit_code == 0, result.output
        assert parquet.read_table(file).num_rows > 0


# --------------------------------------------------------------------------------------- trouble


def small_stack(redis_url: str, **usage: Any) -> Stack:
    return Stack(
        redis_url,
        {"redis": {"timeout_ms": 100}, "models": [fake_model()], "usage": usage},
    )


def ask_some(stack: Stack, key: str, names: list[str]) -> None:
    for name in names:
        assert post(stack, key, "/v1/completions", name, completion()).status == 200


def test_what_ends_while_redis_is_frozen_is_written_once_after_it(own_redis: Any) -> None:
    redis_url, redis_process = own_redis
    names = [f"request-{number}" for number in range(30)]
    with small_stack(redis_url) as stack:
        key = stack.key()
        ask_some(stack, key, names[:10])
        redis_process.send_signal(signal.SIGSTOP)
        ask_some(stack, key, names[10:20])
        # It has been sent, then, and will be sent once more, though Redis does both when it goes on.
        wait_until(lambda: "usage rows wait" in stack.log("gateway"), 10, "an attempt to write")
        redis_process.send_signal(signal.SIGCONT)
        ask_some(stack, key, names[20:])
        wait_until(lambda: len(rows(stack)) >= 30, 10, "all rows")
        assert sorted(row.request_id for row in rows(stack)) == sorted(names)


async def test_a_batch_that_is_sent_again_for_want_of_an_answer_counts_once(redis_url: str) -> None:
    keys, gateway_id = RedisKeys(f"test-{uuid.uuid4().hex[:10]}"), fresh_gateway_id()
    client = connect_async(redis_url, 2000)
    stream = UsageStream(client, keys, RedisBreaker(), gateway_id, max_rows=1000)
    other = UsageStream(client, keys, RedisBreaker(), fresh_gateway_id(), max_rows=1000)
    await stream.write(1, [row(1), row(2)])
    await stream.write(1, [row(1), row(2)])
    await stream.write(2, [row(3)])
    await other.write(1, [row(4)])
    assert await client.xlen(keys.usage) == 4
    assert 0 < await client.ttl(keys.usage_batch(gateway_id)) <= USAGE_BATCH_LIFETIME_S
    await client.aclose()


async def test_a_redis_that_refuses_rows_is_no_reason_not_to_ask_it_for_anything_else(redis_url: str) -> None:
    keys, breaker = RedisKeys(f"test-{uuid.uuid4().hex[:10]}"), RedisBreaker()
    client = connect_async(redis_url, 2000)
    await client.set(keys.usage, "somebody's")
    stream = UsageStream(client, keys, breaker, fresh_gateway_id(), max_rows=1000)
    for _ in range(5):
        with pytest.raises(PlaceUnavailableError):
            await stream.write(1, [row(1)])
    assert not breaker.is_open
    await client.aclose()


def test_rows_beyond_the_bound_are_dropped_and_counted(own_redis: Any) -> None:
    redis_url, redis_process = own_redis
    with small_stack(redis_url, max_waiting_rows=5) as stack:
        key = stack.key()
        ask_some(stack, key, ["first"])
        row_of(stack, "first")
        redis_process.send_signal(signal.SIGSTOP)
        ask_some(stack, key, [f"request-{number}" for number in range(20)])

        def num_dropped() -> int:
            text = stack.get("/metrics")[1].decode()
            return int(float(text.partition('rows_dropped_total{place="Redis"} ')[2].split()[0]))

        dropped = num_dropped()
        redis_process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(rows(stack)) == 21 - dropped, 10, "the rest")
        assert 1 <= dropped <= 15
        assert stack.log("gateway").count("rows are dropped") == 1


def test_the_last_rows_are_written_at_the_end_of_the_drain(redis_url: str, tmp_path: Path) -> None:
    database = tmp_path / "usage.sqlite"
    with small_stack(redis_url, sqlite=str(database)) as stack:
        names = [f"request-{number}" for number in range(5)]
        ask_some(stack, stack.key(), names)
        stack.kill("gateway", signal.SIGTERM)
        assert stack.processes["gateway"].wait(30) == 0
        assert sorted(row.request_id for row in rows(stack)) == names
        with sqlite3.connect(database) as connection:
            assert connection.execute("SELECT count(*) FROM usage").fetchone() == (5,)


def test_a_locked_file_holds_up_nobody(redis_url: str, tmp_path: Path) -> None:
    database = tmp_path / "usage.sqlite"
    with small_stack(redis_url, sqlite=str(database)) as stack:
        key = stack.key()
        ask_some(stack, key, ["first"])
        wait_until(lambda: database.exists() and row_of(stack, "first"), 5, "the file")
        lock = sqlite3.connect(database, isolation_level=None)
        wait_until(lambda: _locked(lock), 5, "the lock")
        ask_some(stack, key, [f"request-{number}" for number in range(5)])
        wait_until(lambda: len(rows(stack)) == 6, 5, "the rows in Redis")
        lock.execute("COMMIT")
        query = "SELECT count(*) FROM usage"
        wait_until(lambda: lock.execute(query).fetchone() == (6,), 10, "the rows in the file")
        lock.close()


def _locked(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    return True


def test_a_stream_that_was_cut_is_told(redis_url: str) -> None:
    with small_stack(redis_url, max_rows=1) as stack:
        ask_some(stack, stack.key(), ["kept"])
        row_of(stack, "kept")
        entry = stack.redis.xrange(stack.keys.usage)[0][1]
        for _ in range(300):
            stack.redis.xadd(stack.keys.usage, entry, maxlen=1, approximate=True)
        assert stack.redis.xlen(stack.keys.usage) < 300
        result = headrace_usage(stack, "--since", "1d")
        assert "Redis has rows only from" in result.stderr
        assert "Redis has rows only from" not in headrace_usage(stack, "--since", "0s").stderr


def test_a_gateway_that_is_to_keep_no_rows_keeps_none_and_lives(redis_url: str) -> None:
    with small_stack(redis_url, max_rows=0) as stack:
        ask_some(stack, stack.key(), ["one", "two"])
        stack.kill("gateway", signal.SIGTERM)
        assert stack.processes["gateway"].wait(30) == 0
        assert not stack.redis.exists(stack.keys.usage)
        assert "has failed" not in stack.log("gateway")
