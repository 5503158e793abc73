"""Usage rows between a request's end and the place where they are kept."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.breaker import RedisBreaker
from gateway.generation import Usage
from gateway.request_account import CLIENT_LEFT, RequestAccount
from gateway.usage.database_file import UsageFile
from gateway.usage.keeper import FORGOTTEN_AT_ONCE, UsageKeeper
from gateway.usage.outlet import BATCH_ROWS, PlaceUnavailableError, UsageOutlet
from shared.config import UsageConfig
from shared.identifiers import EngineId, GatewayId, TenantId
from shared.redis_client import connect_async
from shared.redis_schema import RedisKeys
from shared.usage import UsageRecord
from shared.usage_database import GROUPINGS, SUMS, UsageDatabase, UsageFilter
from tests.stack import wait_until


def row(number: int = 0, **fields: Any) -> UsageRecord:
    return UsageRecord(
        **{
            "record_id": f"row-{number}",
            "request_id": "r",
            "arrived_at": 1_800_000_000.0 + number,
            "tenant": TenantId("acme"),
            "key_id": "key_1",
            "operation": "chat",
            "route": "chat",
            "experiment_version": 1,
            "assigned_variant": "control",
            "variant": "control",
            "model": "m",
            **fields,
        }
    )


class FlakyPlace:
    """Takes nothing while it is away. Remembers what came, and whether it was a batch that it had."""

    name = "the place"

    def __init__(self) -> None:
        self.is_away = False
        self.forgets_to_answer = False
        self.batches: dict[int, list[str]] = {}
        self.num_repeated = 0
        self.was_asked = asyncio.Event()

    async def write(self, number: int, rows: Sequence[UsageRecord]) -> None:
        self.was_asked.set()
        if self.is_away:
            raise PlaceUnavailableError("away")
        self.num_repeated += number in self.batches
        self.batches.setdefault(number, [each.record_id for each in rows])
        if self.forgets_to_answer:
            raise PlaceUnavailableError("no answer")

    @property
    def rows(self) -> list[str]:
        return [name for number in sorted(self.batches) for name in self.batches[number]]


class World:
    def __init__(self, max_waiting: int = 10_000) -> None:
        self.place = FlakyPlace()
        self.dropped: list[str] = []
        self.outlet = UsageOutlet(self.place, max_waiting=max_waiting, on_dropped=self.dropped.append)

    async def follow_until_asked(self) -> None:
        self.place.was_asked.clear()
        task = asyncio.create_task(self.outlet.follow())
        await asyncio.wait_for(self.place.was_asked.wait(), 5)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_full_batch_is_written_at_once_and_the_rest_at_the_end() -> None:
    world = World()
    for number in range(BATCH_ROWS + 7):
        world.outlet.put(row(number))
    await world.outlet.close()
    assert [len(batch) for batch in world.place.batches.values()] == [BATCH_ROWS, 7]
    assert world.place.rows == [f"row-{number}" for number in range(BATCH_ROWS + 7)]
    assert world.outlet.num_waiting == 0


async def test_rows_wait_for_a_place_that_is_away_and_come_in_order(caplog: Any) -> None:
    world = World()
    world.place.is_away = True
    for number in range(5):
        world.outlet.put(row(number))
    await world.follow_until_asked()
    assert (world.place.rows, world.outlet.num_waiting) == ([], 5)
    world.outlet.put(row(5))
    world.place.is_away = False
    await world.outlet.close()
    assert world.place.rows == [f"row-{number}" for number in range(6)]
    told = [record.message for record in caplog.records]
    assert sum("wait" in text for text in told) == 1
    assert sum("again" in text for text in told) == 1


async def test_a_batch_whose_writing_was_not_confirmed_comes_again_under_its_number() -> None:
    world = World()
    world.place.forgets_to_answer = True
    world.outlet.put(row(0))
    await world.follow_until_asked()
    world.outlet.put(row(1))
    world.place.forgets_to_answer = False
    await world.outlet.close()
    assert world.place.num_repeated == 1
    assert world.place.batches == {1: ["row-0"], 2: ["row-1"]}


async def test_beyond_the_bound_new_rows_are_dropped_counted_and_told_once(caplog: Any) -> None:
    world = World(max_waiting=10)
    world.place.is_away = True
    for number in range(15):
        world.outlet.put(row(number))
    assert world.dropped == ["the place"] * 5
    assert sum("dropped" in record.message for record in caplog.records) == 1
    world.place.is_away = False
    await world.outlet.close()
    assert world.place.rows == [f"row-{number}" for number in range(10)]


async def test_what_nobody_takes_at_the_end_is_said_to_be_lost(caplog: Any) -> None:
    world = World()
    world.place.is_away = True
    world.outlet.put(row())
    await world.outlet.close()
    assert any("1 usage rows are lost" in record.message for record in caplog.records)


# -------------------------------------------------------------------------------------- accounts


def account(**fields: Any) -> RequestAccount:
    return RequestAccount(
        **{
            "request_id": "r",
            "tenant": TenantId("acme"),
            "key_id": "key_1",
            "operation": "chat",
            "route": "chat",
            "experiment_version": 1,
            "assigned_variant": "control",
            "variant": "control",
            "model": "m",
            "subject_hash": 2**64 - 1,
            "arrived_at": 0.0,
            "usage": Usage(10, 5, 4),
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "status", "outcome", "tokens"),
    [
        ({"first_token_at": 1.0, "is_due": True}, 200, "ok", (10, 4, 5)),
        ({}, 200, "ok", (10, 4, 5)),  # embeddings, beam search
        ({}, 429, "refused", (0, 0, 0)),
        ({"engine_id": EngineId("e")}, 502, "failed", (0, 0, 0)),  # it was told that there is nothing
        ({"engine_id": EngineId("e")}, CLIENT_LEFT, "aborted", (10, 4, 5)),  # it was computed for it
        # The engine had made tokens, and nobody was told any: the answer was not to be streamed.
        ({"engine_id": EngineId("e"), "first_token_at": 1.0}, 502, "failed", (0, 0, 0)),
        ({"engine_id": EngineId("e"), "first_token_at": 1.0}, CLIENT_LEFT, "aborted", (10, 4, 5)),
        # A stream that had only been kept alive, and one that had begun.
        ({"first_token_at": 1.0, "failure": (502, "upstream_error")}, 200, "failed", (0, 0, 0)),
        ({"is_due": True, "failure": (502, "upstream_error")}, 200, "failed", (10, 4, 5)),
        ({"first_token_at": 1.0, "failure": (CLIENT_LEFT, None)}, 200, "aborted", (10, 4, 5)),
    ],
)
def test_a_row_has_the_tokens_that_its_tenant_got(
    fields: dict[str, Any], status: int, outcome: str, tokens: tuple[int, int, int]
) -> None:
    told = account(**fields).record(status, None)
    assert told.outcome == outcome
    assert (told.input_tokens, told.cached_tokens, told.output_tokens) == tokens


@pytest.mark.parametrize(
    ("fields", "is_charged"),
    [
        ({"engine_id": EngineId("e"), "first_token_at": 1.0}, False),  # failed before a token was told
        ({"engine_id": EngineId("e"), "failure": (502, "upstream_error")}, False),
        ({"is_due": True}, True),
        ({"is_due": True, "failure": (502, "upstream_error")}, True),
        ({"engine_id": EngineId("e"), "was_left": True}, True),
        ({"engine_id": EngineId("e"), "failure": (CLIENT_LEFT, None)}, True),
        ({"was_left": True}, False),  # no engine had it yet
    ],
)
def test_limits_count_what_a_client_was_told_of_or_has_left(fields: dict[str, Any], is_charged: bool) -> None:
    assert account(**fields).charged == (Usage(10, 5, 4) if is_charged else Usage(0, 0, 0))


def test_what_the_client_was_told_by_a_variant_that_failed_is_not_due_for_the_next() -> None:
    fallen = account(is_due=True)
    fallen.fell_back("other", "m")
    fallen.usage = Usage(9, 0, 9)
    assert fallen.charged == Usage(0, 0, 0)
    assert fallen.record(502, None).input_tokens == 0


def test_rows_of_one_request_id_are_different_rows() -> None:
    assert account().record(200, None).record_id != account().record(200, None).record_id


# -------------------------------------------------------------------------------------- database


def columns_of(path: Path) -> set[str]:
    with sqlite3.connect(path) as connection:
        return {each[1] for each in connection.execute("PRAGMA table_info(usage)")}


def test_the_table_has_a_column_for_each_fact_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    UsageDatabase.open(path).close()
    assert columns_of(path) == {field.name for field in msgspec.structs.fields(UsageRecord)}


def test_a_file_of_an_older_version_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE usage (record_id TEXT PRIMARY KEY, arrived_at REAL, tenant TEXT)")
        connection.execute("INSERT INTO usage VALUES ('old', 1.0, 'acme')")
    database = UsageDatabase.open(path)
    database.insert([row(subject_hash=2**64 - 1)])
    assert [each["record_id"] for each in database.rows(UsageFilter(with_shadow=True))] == ["old", "row-0"]
    database.close()


def test_a_row_that_is_inserted_twice_counts_once() -> None:
    database = UsageDatabase.in_memory()
    database.insert([row(1), row(2)])
    database.insert([row(2), row(3)])
    assert database.sums(UsageFilter(), [])[0]["requests"] == 3


def test_sums_are_by_what_was_asked_for_and_leave_shadows_out_unless_asked() -> None:
    database = UsageDatabase.in_memory()
    database.insert(
        [
            row(1, input_tokens=10, cached_tokens=8, output_tokens=1),
            row(2, input_tokens=20, output_tokens=2, model="n", outcome="failed", status=502),
            row(3, input_tokens=40, tenant=TenantId("b"), outcome="refused", status=429),
            row(4, input_tokens=99, is_shadow=True),
            row(86_400, outcome="aborted", status=499),
        ]
    )
    by_model = database.sums(UsageFilter(tenant="acme"), ["tenant", "model"])
    assert [tuple(each.values()) for each in by_model] == [
        ("acme", "m", 2, 10, 8, 1, 0, 0, 1),
        ("acme", "n", 1, 20, 0, 2, 1, 0, 0),
    ]
    assert database.sums(UsageFilter(), [])[0] == {
        "requests": 4, "input_tokens": 70, "cached_tokens": 8, "output_tokens": 3,
        "errors": 1, "refused": 1, "aborted": 1,
    }  # fmt: skip
    assert database.sums(UsageFilter(with_shadow=True), [])[0]["input_tokens"] == 169
    days = database.sums(UsageFilter(), ["day"])
    assert [each["day"] for each in days] == ["2027-01-15", "2027-01-16"]
    late = UsageFilter(since=1_800_000_002.0, until=1_800_000_003.0)
    assert database.sums(late, [])[0]["requests"] == 1
    assert set(database.sums(UsageFilter(), list(GROUPINGS))[0]) == {*GROUPINGS, *SUMS}


def test_old_rows_are_deleted_in_bounded_batches_that_an_index_finds() -> None:
    database = UsageDatabase.in_memory()
    database.insert(row(number) for number in (3, 1, 2, 0, 4))
    before = row(3).arrived_at
    assert [database.delete_before(before, 2) for _ in range(3)] == [2, 1, 0]
    assert [each["record_id"] for each in database.rows(UsageFilter())] == ["row-3", "row-4"]
    statements: list[str] = []
    connection = database._connection
    connection.set_trace_callback(statements.append)
    database.delete_before(before, 2)
    connection.set_trace_callback(None)
    [statement] = [text for text in statements if text.startswith("DELETE")]
    plan = " ".join(step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {statement}"))
    assert "usage_by_arrival" in plan
    assert "SCAN" not in plan.replace("SCAN LIST", "")


@pytest.mark.parametrize("keep_days", [None, 30])
async def test_a_file_keeps_its_rows_for_as_long_as_is_configured(
    tmp_path: Path, keep_days: int | None
) -> None:
    path = tmp_path / "usage.sqlite"
    now = time.time()
    ages = [("old", 31.0), ("young", 29.0)]
    database = UsageDatabase.open(path)
    database.insert(row(record_id=name, arrived_at=now - days * 86_400) for name, days in ages)
    database.insert(row(number, arrived_at=now - 40 * 86_400) for number in range(FORGOTTEN_AT_ONCE))
    database.close()
    config = UsageConfig(max_rows=0, sqlite=str(path), sqlite_keep_days=keep_days)
    unasked = connect_async("redis://127.0.0.1:1", 100)
    keeper = UsageKeeper(
        config, unasked, RedisKeys("n"), RedisBreaker(), GatewayId("g"), on_dropped=lambda _: None
    )
    following = asyncio.create_task(keeper.follow())
    keeper.put(row(record_id="fresh", arrived_at=now))

    def left() -> set[str]:
        reader = UsageDatabase.open_to_read(path)
        try:
            return {each["record_id"] for each in reader.rows(UsageFilter())}
        finally:
            reader.close()

    num_left = 2 if keep_days else 3 + FORGOTTEN_AT_ONCE
    await asyncio.to_thread(wait_until, lambda: "fresh" in left() and len(left()) == num_left, 10)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await keeper.close()
    await unasked.aclose()
    assert left() >= {"young", "fresh"}


def test_two_processes_and_a_reader_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    writer = textwrap.dedent("""
        import sys
        from pathlib import Path
        import msgspec
        from shared.usage import UsageRecord
        from shared.usage_database import UsageDatabase
        row = msgspec.json.decode(sys.argv[3], type=UsageRecord)
        database = UsageDatabase.open(Path(sys.argv[1]))
        for batch in range(20):
            names = [f"{sys.argv[2]}-{batch}-{number}" for number in range(50)]
            database.insert(msgspec.structs.replace(row, record_id=name) for name in names)
    """)
    some = msgspec.json.encode(row()).decode()
    processes = [subprocess.Popen([sys.executable, "-c", writer, str(path), name, some]) for name in "ab"]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert UsageDatabase.open_to_read(path).sums(UsageFilter(), [])[0]["requests"] == 2 * 20 * 50


async def test_a_file_that_cannot_be_written_is_no_failure_but_waits(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "usage.sqlite"
    file = UsageFile(path)
    with pytest.raises(PlaceUnavailableError):
        await file.write(1, [row(1)])
    path.parent.mkdir()
    await file.write(1, [row(1)])
    path.unlink()
    path.with_name(path.name + "-wal").unlink(missing_ok=True)
    await file.close()
