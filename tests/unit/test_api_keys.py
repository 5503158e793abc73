"""API keys in a real Valkey: what is written late is refused, and what is revoked stays so."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from shared.api_keys import ApiKeyError, ApiKeyStore, digest_of
from shared.config import Limits
from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, RedisKeys, from_json, to_json

PEPPER = b"pepper"
TENANT = TenantId("acme")


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def keys() -> RedisKeys:
    return RedisKeys(f"keys-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def store(client: Any, keys: RedisKeys) -> ApiKeyStore:
    return ApiKeyStore(client, keys, PEPPER)


def renamed(record: ApiKeyRecord, name: str, version: int | None = None) -> ApiKeyRecord:
    return msgspec.structs.replace(record, name=name, version=version or record.version + 1)


def test_redis_holds_neither_the_secret_nor_anything_to_make_it_from(store, client, keys) -> None:
    secret, record = store.create(TENANT, name="laptop", limits=Limits(requests_per_minute=5))
    everything = b"".join([*client.hvals(keys.api_keys), *client.hkeys(keys.api_key_digests)])
    shown = record.secrets[0].display_prefix
    assert secret.startswith(shown)
    assert len(secret) - len(shown) > 32
    assert secret[len(shown) :].encode() not in everything
    assert digest_of(secret, b"another pepper") != record.secrets[0].digest
    assert store.get(record.key_id) == record == store.of_secret(secret)
    assert store.get(record.key_id).limits == Limits(requests_per_minute=5)


def test_a_write_of_what_was_read_before_another_write_is_refused(store) -> None:
    read = store.create(TENANT).record
    assert store.write(renamed(read, "first"), read.version) == "ok"
    assert store.write(renamed(read, "late"), read.version) == "conflict"
    assert store.get(read.key_id).name == "first"


def test_a_revoked_key_cannot_be_brought_back(store) -> None:
    secret, read = store.create(TENANT)
    revoked = store.revoke(read.key_id)
    assert store.write(renamed(read, "late"), read.version) == "revoked"
    assert store.write(renamed(read, "later", revoked.version + 1), revoked.version) == "revoked"
    assert store.write(msgspec.structs.replace(read, version=1), 0) == "exists"
    for change in (store.revoke, store.retire, lambda key_id: store.rotate(key_id, 60.0)):
        with pytest.raises(ApiKeyError, match="is revoked, and stays so"):
            change(read.key_id)
    kept = store.of_secret(secret)
    assert kept is not None
    assert kept.revoked_at is not None


def test_a_late_write_brings_nothing_back_that_redis_has_lost(store, client, keys) -> None:
    read = store.create(TENANT).record
    client.delete(keys.api_keys, keys.api_key_digests, keys.api_keys_version)
    assert store.write(renamed(read, "late"), read.version) == "missing"
    assert store.list() == []


def test_every_write_moves_the_version_of_all_keys_also_after_a_flush(store, client, keys) -> None:
    def version() -> int:
        return int(client.get(keys.api_keys_version))

    seen = []
    first = store.create(TENANT).record
    seen.append(version())
    store.rotate(first.key_id, 60.0)
    seen.append(version())
    assert store.write(first, 0) == "exists"
    assert version() == seen[-1], "nothing was written"
    client.delete(keys.api_keys, keys.api_key_digests, keys.api_keys_version)
    for _ in range(2):
        store.create(TENANT)
        seen.append(version())
    assert seen == sorted(set(seen))


def test_rotation_gives_a_second_secret_that_ends_the_first_one_later(store, client, keys) -> None:
    old, record = store.create(TENANT)
    began = time.time()
    new, rotated = store.rotate(record.key_id, overlap_s=60.0)
    assert rotated.key_id == record.key_id
    assert [secret.digest for secret in rotated.secrets] == [digest_of(new, PEPPER), digest_of(old, PEPPER)]
    assert rotated.secrets[0].not_after is None
    assert 60 <= rotated.secrets[1].not_after - began < 65
    assert store.of_secret(old) == store.of_secret(new) == rotated

    with pytest.raises(ApiKeyError, match="has two secrets already"):
        store.rotate(record.key_id, overlap_s=60.0)
    assert store.retire(record.key_id).secrets == rotated.secrets[:1]
    assert store.of_secret(old) is None
    with pytest.raises(ApiKeyError, match="one secret only"):
        store.retire(record.key_id)

    newest, replaced = store.rotate(record.key_id, overlap_s=0.0)
    assert [secret.digest for secret in replaced.secrets] == [digest_of(newest, PEPPER)]
    assert list(client.hgetall(keys.api_key_digests)) == [digest_of(newest, PEPPER).encode()]


def test_a_secret_whose_overlap_is_over_makes_room_for_the_next_rotation(store) -> None:
    record = store.create(TENANT).record
    store.rotate(record.key_id, overlap_s=1e-6)
    assert len(store.rotate(record.key_id, overlap_s=60.0).record.secrets) == 2


def test_of_changes_at_one_instant_none_is_lost(store, redis_url, keys) -> None:
    record = store.create(TENANT, name="").record
    begin = threading.Barrier(4)

    def append(letter: str) -> None:
        with redis.Redis.from_url(redis_url, protocol=2) as own:
            begin.wait()
            ApiKeyStore(own, keys, PEPPER).change(
                record.key_id, lambda read: msgspec.structs.replace(read, name=read.name + letter)
            )

    threads = [threading.Thread(target=append, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    changed = store.get(record.key_id)
    assert sorted(changed.name) == ["a", "b", "c", "d"]
    assert changed.version == 5


def test_a_change_that_was_sent_twice_because_its_answer_was_lost_is_made_once(store) -> None:
    record = store.create(TENANT).record
    write = store.write
    store.write = lambda *arguments: (write(*arguments), write(*arguments))[1]  # as redis-py does then
    _, rotated = store.rotate(record.key_id, 60.0)
    assert store.revoke(record.key_id).version == 3
    assert rotated.version == 2
    assert store.create(TENANT).record.version == 1


def test_a_key_whose_id_is_another_one_s_by_chance_is_not_told_as_made(store, monkeypatch) -> None:
    taken = store.create(TENANT).record
    monkeypatch.setattr("shared.api_keys.secrets.token_hex", lambda _: taken.key_id.removeprefix("key_"))
    with pytest.raises(ApiKeyError, match="another key"):
        store.create(TENANT)
    assert store.list() == [taken]


def test_a_record_that_cannot_be_read_does_not_hide_the_others(store, client, keys, caplog) -> None:
    record = store.create(TENANT).record
    client.hset(keys.api_keys, "key_broken", b"{")
    assert store.list() == [record]
    assert "key_broken" in caplog.text
    with pytest.raises(msgspec.DecodeError):
        store.get("key_broken")


def test_a_key_that_does_not_exist_is_named(store) -> None:
    with pytest.raises(ApiKeyError, match="there is no key 'key_none'"):
        store.revoke("key_none")


def test_what_is_not_set_takes_no_place_and_what_is_comes_back(store) -> None:
    record = store.create(TENANT).record
    assert b"cidrs" not in to_json(record)
    full = msgspec.structs.replace(
        record,
        not_before=1.0,
        not_after=2.0,
        models=["a"],
        cidrs=["10.0.0.0/8"],
        limits=Limits(max_concurrency=1),
    )
    assert from_json(ApiKeyRecord, to_json(full)) == full


def test_a_burst_without_a_rate_that_was_stored_once_does_not_lock_its_key_out(store, client, keys) -> None:
    record = store.create(TENANT, limits=Limits(max_concurrency=1)).record
    written = to_json(record).replace(b'"burst":null', b'"burst":7')
    assert written != to_json(record)
    client.hset(keys.api_keys, record.key_id, written)
    [read] = store.list()
    assert read.limits is not None
    assert (read.limits.burst, read.limits.requests_per_minute) == (7, None)
