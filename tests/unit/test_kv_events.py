"""KV events: whoever applies them in order knows what the engine can find in its cache."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from engine_service.block_pool import chained_hash, root_hash
from engine_service.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    KvEventRecorder,
)
from engine_service.refusal import Refusal
from engine_service.sequence import BlockHash
from tests.unit.test_block_pool import make_sequence
from tests.unit.worlds import World, make_prompt, make_world

SALTS = ["", "", "", "a", "b"]
ROOTS = [root_hash(salt) for salt in set(SALTS)]


class Subscriber:
    """What a router keeps of one engine; it believes no hash that does not follow from the tokens."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self.seen: list[str] = []

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            self.seen.append(type(event).__name__)
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    assert self.hashes.issuperset(event.block_hashes), "what was not stored is removed"
                    self.hashes.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.hashes.clear()

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        parents = ROOTS if event.parent_block_hash is None else [event.parent_block_hash]
        for index, block_hash in enumerate(event.block_hashes):
            token_ids = event.token_ids[index * size : (index + 1) * size]
            assert block_hash in [chained_hash(parent, token_ids) for parent in parents]
            assert block_hash not in self.hashes, "what is stored is stored again"
            parents = [block_hash]
        self.hashes.update(event.block_hashes)


def take_events(world: World) -> list[KvEvent]:
    events = world.kv_events[:]
    world.kv_events.clear()
    return events


@pytest.mark.parametrize("seed", range(4))
def test_a_subscriber_knows_the_cache_from_events_alone(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = make_world(
        num_blocks=rng.choice([16, 25]),
        block_size=rng.choice([1, 3, 4]),
        max_model_len=16,
        max_queued_requests=10,
        force_preemption_every=rng.choice([0, 5]),
    )
    subscriber = Subscriber()
    for operation in range(1500):
        choice = rng.random()
        if choice < 0.3:
            prompt = make_prompt(rng.randint(1, 12), start=rng.choice([0, 0, 300, rng.randint(0, 800)]))
            with contextlib.suppress(Refusal):  # the queue is short
                world.add(f"r{operation}", prompt, cache_salt=rng.choice(SALTS), max_tokens=rng.randint(1, 4))
        elif choice < 0.33 and world.output:
            world.abort(rng.choice(list(world.output)))
        elif choice < 0.34:
            world.engine.reset_prefix_cache()
        else:
            world.step()
        subscriber.apply(take_events(world))
        assert subscriber.hashes == world.pool.cached_hashes()
    assert subscriber.seen.count("BlockStored") > 100
    assert subscriber.seen.count("BlockRemoved") > 100
    assert subscriber.seen.count("AllBlocksCleared") > 3


def test_blocks_that_follow_on_each_other_are_one_event() -> None:
    world = make_world(block_size=4)
    world.add("r", make_prompt(9), max_tokens=4)
    world.run()
    prompt, output = take_events(world)
    assert isinstance(prompt, BlockStored)
    assert isinstance(output, BlockStored)
    assert (prompt.parent_block_hash, len(prompt.block_hashes)) == (None, 2)
    assert prompt.token_ids == make_prompt(8)
    assert output.parent_block_hash == prompt.block_hashes[-1]
    assert output.token_ids == [8, *world.output["r"][:3]]


def test_a_hit_stores_nothing_again() -> None:
    world = make_world(block_size=4)
    for name in ("first", "second"):
        world.add(name, make_prompt(9), max_tokens=1)
        world.run()
    assert len(take_events(world)) == 1


def test_an_event_names_the_adapter() -> None:
    batches: list[list[KvEvent]] = []
    recorder = KvEventRecorder(2, batches.append)
    sequence = make_sequence([1, 2], adapter="lora", block_hashes=[BlockHash(b"h")])
    recorder.stored(sequence, 0)
    recorder.flush()
    recorder.flush()
    assert len(batches) == 1
    assert isinstance(batches[0][0], BlockStored)
    assert batches[0][0].lora_name == "lora"


def test_the_layout_is_that_of_vllm() -> None:
    stored = BlockStored([BlockHash(b"b")], BlockHash(b"a"), [1, 2], 2, None, "GPU", None)
    batch = KvEventBatch(1.5, [stored, BlockRemoved([BlockHash(b"b")], "GPU"), AllBlocksCleared()], 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            ["BlockStored", [b"b"], b"a", [1, 2], 2, None, "GPU", None],
            ["BlockRemoved", [b"b"], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


# A subscriber of vLLM's declares fields that came later, with defaults; it reads these events all the same.
class _Event(msgspec.Struct, array_like=True, tag=True):
    pass


class _Stored(_Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored]
    data_parallel_rank: int | None = None


def test_a_subscriber_with_newer_optional_fields_reads_them() -> None:
    world = make_world(block_size=4)
    world.add("r", make_prompt(4), max_tokens=1)
    world.run()
    payload = msgspec.msgpack.encode(KvEventBatch(0.0, take_events(world), 0))
    batch = msgspec.msgpack.decode(payload, type=_Batch)
    assert batch.events[0].token_ids == make_prompt(4)
    assert batch.events[0].extra_keys is None
