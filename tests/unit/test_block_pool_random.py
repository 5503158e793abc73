"""Random operations on the block pool, against dictionaries and a list that do the same the slow way.

Content is a small tree of tokens, so that prefixes are shared, evicted and published again all the time.
`make soak` runs a million operations.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from engine_service.block_pool import BlockPool, extend_block_hashes, root_hash
from engine_service.sequence import BlockHash, BlockId, Sequence
from shared.identifiers import RequestId, TenantId
from tests.unit.worlds import make_sampling

_MAX_TABLE_BLOCKS = 7
_SAMPLING = make_sampling()


def num_equal(tokens: list[int], others: list[int]) -> int:
    """From the beginning on."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class NaivePool:
    """The contract of the pool, without a thought for speed."""

    def __init__(self, num_blocks: int) -> None:
        self.free = [BlockId(index) for index in range(num_blocks)]  # the next to be taken first
        self.references: Counter[BlockId] = Counter()
        self.found: dict[BlockHash, BlockId] = {}
        self.tails: dict[BlockId, tuple[BlockHash, list[int]]] = {}  # in the order of their publication

    def cached_prefix(self, hashes: list[BlockHash]) -> list[BlockId]:
        missing = next((index for index, each in enumerate(hashes) if each not in self.found), len(hashes))
        return [self.found[each] for each in hashes[:missing]]

    def hold(self, block_ids: list[BlockId]) -> None:
        for block_id in block_ids:
            if self.references[block_id] == 0:
                self.free.remove(block_id)
            self.references[block_id] += 1

    def take(self, num_blocks: int) -> list[BlockId]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        self.references.update(taken)
        self.found = {each: block_id for each, block_id in self.found.items() if block_id not in taken}
        self.tails = {block_id: tail for block_id, tail in self.tails.items() if block_id not in taken}
        return taken

    def release(self, block_ids: list[BlockId]) -> None:
        self.references.subtract(block_ids)
        self.free += [block_id for block_id in reversed(block_ids) if self.references[block_id] == 0]

    def publish(self, sequence: Sequence, index: int) -> None:
        self.found.setdefault(sequence.block_hashes[index], sequence.block_ids[index])

    def find_tail(self, parent: BlockHash, token_ids: list[int]) -> int:
        """Tokens that the best tail shares with these."""
        tails = [tail for other, tail in self.tails.values() if other == parent]
        return max((num_equal(tail, token_ids) for tail in tails), default=0)

    def publish_tail(self, block_id: BlockId, parent: BlockHash, token_ids: list[int]) -> None:
        tails = {other: tail for other, (root, tail) in self.tails.items() if root == parent}
        if any(tail[: len(token_ids)] == token_ids for tail in tails.values()):
            return
        self.tails.pop(block_id, None)
        for other, tail in tails.items():
            is_superseded = token_ids[: len(tail)] == tail and self.references[other] == 0
            if is_superseded and other != block_id:
                del self.tails[other]
                if other not in self.found.values():  # of no use to anybody now: it is taken first
                    self.free.remove(other)
                    self.free.insert(0, other)
        self.tails[block_id] = parent, token_ids


class HashSubscriber:
    """Knows the cache from what the pool tells, and from nothing else."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()

    def stored(self, sequence: Sequence, index: int) -> None:
        assert sequence.block_hashes[index] not in self.hashes, "a block is stored twice"
        self.hashes.add(sequence.block_hashes[index])

    def removed(self, block_hash: BlockHash) -> None:
        self.hashes.remove(block_hash)

    def cleared(self) -> None:
        self.hashes.clear()


class PoolWalk:
    """A pool and its naive twin, given the same operations."""

    def __init__(self, rng: random.Random) -> None:
        num_blocks = rng.randint(8, 16)
        self._rng = rng
        self._subscriber = HashSubscriber()
        self._pool = BlockPool(num_blocks, rng.choice([1, 2, 3]), self._subscriber)
        self._naive = NaivePool(num_blocks)
        self._live: list[Sequence] = []
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """One operation, then everything is compared."""
        choice = self._rng.random()
        if choice < 0.3 or not self._live:
            self._start()
        elif choice < 0.55:
            self._publish(self._rng.choice(self._live))
        elif choice < 0.65:
            self._grow(self._rng.choice(self._live))
        elif choice < 0.7:
            self._share(self._rng.choice(self._live))
        elif choice < 0.78:
            self._tail(self._rng.choice(self._live))
        elif choice < 0.998:
            self._end(self._live.pop(self._rng.randrange(len(self._live))))
        else:
            self._reset()
        self._compare()

    def drain(self) -> None:
        while self._live:
            self._end(self._live.pop())
            self._compare()
        assert self._pool.num_free_blocks == self._pool.num_blocks

    def _start(self) -> None:
        num_blocks = self._rng.randint(1, _MAX_TABLE_BLOCKS - 1)
        sequence = Sequence(
            RequestId("r"),
            [self._rng.randrange(2)] * self._pool.block_size * num_blocks,
            num_prompt_tokens=1,
            sampling=_SAMPLING,
            tenant=TenantId("acme"),
            adapter=self._rng.choice(["", "", "adapter"]),
        )
        sequence.token_ids[-1] = self._rng.randrange(2)
        extend_block_hashes(sequence, self._pool.block_size)
        hit = self._pool.cached_prefix(sequence.block_hashes)
        assert hit == self._naive.cached_prefix(sequence.block_hashes)
        num_missing = num_blocks - len(hit)
        num_revived = self._pool.num_free_among(hit)
        assert num_revived == sum(block_id in self._naive.free for block_id in hit)
        if num_missing > self._pool.num_free_blocks - num_revived:
            self.counts["full"] += 1
            return
        self._pool.hold(hit)
        self._naive.hold(hit)
        sequence.block_ids = [*hit, *self._take(num_missing)]
        self._live.append(sequence)
        self.counts["hit" if hit else "missed"] += 1

    def _grow(self, sequence: Sequence) -> None:
        if len(sequence.block_ids) >= _MAX_TABLE_BLOCKS or not self._pool.num_free_blocks:
            return
        sequence.token_ids += [self._rng.randrange(2)] * self._pool.block_size
        extend_block_hashes(sequence, self._pool.block_size)
        sequence.block_ids += self._take(1)
        self.counts["grown"] += 1

    def _take(self, num_blocks: int) -> list[BlockId]:
        num_cached = len(self._naive.found)
        taken = self._pool.take(num_blocks)
        assert taken == self._naive.take(num_blocks)
        self.counts["evicted"] += num_cached - len(self._naive.found)
        return taken

    def _publish(self, sequence: Sequence) -> None:
        """The first block that cannot be found yet, or any, as after a reset."""
        index = len(self._naive.cached_prefix(sequence.block_hashes))
        if index == len(sequence.block_ids) or self._rng.random() < 0.1:
            index = self._rng.randrange(len(sequence.block_ids))
        self._pool.publish(sequence, index)
        self._naive.publish(sequence, index)
        self.counts["published"] += 1

    def _share(self, sequence: Sequence) -> None:
        twin = Sequence(
            RequestId("twin"),
            sequence.token_ids[:],
            num_prompt_tokens=1,
            sampling=_SAMPLING,
            tenant=TenantId("acme"),
            adapter=sequence.adapter,
            block_ids=sequence.block_ids[:],
            block_hashes=sequence.block_hashes[:],
        )
        self._pool.hold(twin.block_ids)
        self._naive.hold(twin.block_ids)
        self._live.append(twin)
        self.counts["shared"] += 1

    def _tail(self, sequence: Sequence) -> None:
        """The beginning of a block can be found; then another beginning is looked for."""
        size = self._pool.block_size
        index = self._rng.randrange(len(sequence.block_ids))
        parent = sequence.block_hashes[index - 1] if index else root_hash("", sequence.adapter)
        begin = index * size
        tail = sequence.token_ids[begin : begin + self._rng.randint(1, size)]
        self._pool.publish_tail(sequence.block_ids[index], parent, tail)
        self._naive.publish_tail(sequence.block_ids[index], parent, tail)
        wanted = [self._rng.randrange(2) for _ in range(size)]
        found = self._pool.find_tail(parent, wanted)
        assert (found[1] if found is not None else 0) == self._naive.find_tail(parent, wanted)
        if found is not None:
            root, of_block = self._naive.tails[found[0]]
            assert root == parent
            assert of_block[: found[1]] == wanted[: found[1]]
        self.counts["tail found" if found is not None else "tail missed"] += 1

    def _end(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_ids)
        self._naive.release(sequence.block_ids)
        self.counts["released"] += 1

    def _reset(self) -> None:
        assert self._pool.reset_prefix_cache() == len(self._naive.found)
        self._naive.found.clear()
        self._naive.tails.clear()
        self.counts["reset"] += 1

    def _compare(self) -> None:
        self._pool.check(sequence.block_ids for sequence in self._live)
        assert self._pool.free_order() == self._naive.free
        cached = self._pool.cached_hashes()
        assert cached == self._naive.found.keys()
        assert cached == self._subscriber.hashes


def walk(seed: int, num_operations: int, operations_per_pool: int = 5_000) -> Counter[str]:
    """Checks each of so many operations, on pools of several sizes; returns how many there were of a kind."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for first in range(0, num_operations, operations_per_pool):
        pool_walk = PoolWalk(rng)
        for _ in range(min(operations_per_pool, num_operations - first)):
            pool_walk.step()
        pool_walk.drain()
        counts += pool_walk.counts
    print(f"seed {seed}: {num_operations} operations, each checked: {dict(counts)}")
    return counts


def assert_saw_everything(counts: Counter[str], num_operations: int) -> None:
    kinds = {"hit", "missed", "full", "grown", "evicted", "published", "shared", "released", "reset"}
    assert counts.keys() == kinds | {"tail found", "tail missed"}
    assert counts["evicted"] > num_operations / 50
    assert counts["hit"] > num_operations / 50


def test_random_operations_keep_the_pool_equal_to_a_naive_one() -> None:
    assert_saw_everything(walk(seed=1, num_operations=100_000), 300_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_random_operations_leak_nothing() -> None:
    assert_saw_everything(walk(seed=random.randrange(2**32), num_operations=1_000_000), 1_000_000)
