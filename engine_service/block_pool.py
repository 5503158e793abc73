"""KV blocks: who holds them, which are free, and which prefixes they hold.

A block is in exactly one of two places: referenced by the tables of running sequences, or on the
free list. A free block keeps its hash until somebody takes it, so "free" and "cached" are not
opposites: the free list is the cache's eviction order as well, least recently used first.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine_service.sequence import BlockHash, BlockId, Sequence

_HASH_BYTES = 16
_MAX_TAILS = 64  # that are remembered for one prefix; a beam search needs one for each beam


@dataclass(slots=True, eq=False)
class Block:
    """One page of KV cache. All are made at start; none is created or dropped while serving."""

    block_id: BlockId
    num_references: int = 0
    block_hash: BlockHash | None = None  # set while the block can be found by its content
    tail_parent: BlockHash | None = None  # set while its beginning can be found
    tail_token_ids: list[int] = field(default_factory=list)  # of that beginning
    previous: Block | None = None  # neighbours on the free list; None while referenced
    next: Block | None = None


class FreeList:
    """Free blocks, least recently used first: a doubly linked list through the blocks themselves.

    Not a deque, because a prefix hit takes a block out of the middle, which must not cost O(n).
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(BlockId(-1))  # both ends are fakes, so that no operation has an edge case
        self._tail = Block(BlockId(-1))
        self._head.next, self._tail.previous = self._tail, self._head
        self._num_blocks = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._num_blocks

    def append(self, block: Block) -> None:
        last = self._tail.previous
        assert last is not None, "the free list has lost its tail"
        assert block.next is None, f"block {block.block_id} is on the free list twice"
        last.next, block.previous = block, last
        block.next, self._tail.previous = self._tail, block
        self._num_blocks += 1

    def prepend(self, block: Block) -> None:
        """For what is of no use to anybody: it is taken first."""
        first = self._head.next
        assert first is not None, "the free list has lost its head"
        assert block.next is None, f"block {block.block_id} is on the free list twice"
        self._head.next, block.previous = block, self._head
        block.next, first.previous = first, block
        self._num_blocks += 1

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.next
        assert before is not None, f"block {block.block_id} is not on the free list"
        assert after is not None, f"block {block.block_id} is not on the free list"
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._num_blocks -= 1

    def pop_oldest(self) -> Block:
        block = self._head.next
        assert block is not None, "the free list has lost its head"
        assert block is not self._tail, "the free list is empty"
        self.remove(block)
        return block

    def blocks(self) -> list[Block]:
        """Oldest first; walks the links and verifies them."""
        found: list[Block] = []
        block = self._head
        while block.next is not None:
            assert block.next.previous is block, f"free list: links around block {block.block_id} disagree"
            block = block.next
            found.append(block)
        assert found.pop() is self._tail, "free list: does not end at its tail"
        assert len(found) == self._num_blocks, "free list: counts another number of blocks than it links"
        return found


class CacheListener(Protocol):
    """Is told what can be found in the cache from now on, and what no longer."""

    def stored(self, sequence: Sequence, index: int) -> None:
        """Block `index` of the sequence can be found, by `sequence.block_hashes[index]`."""

    def removed(self, block_hash: BlockHash) -> None: ...

    def cleared(self) -> None:
        """Nothing can be found any more."""


class BlockPool:
    """Owns all blocks of an engine. Counts references; a block without any is free.

    Tables are append-only: two blocks of equal content are never merged, since that would change
    the table of a running sequence. The first one to be published is the one that can be found.
    """

    def __init__(self, num_blocks: int, block_size: int, listener: CacheListener | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block(BlockId(index)) for index in range(num_blocks)]
        self._free = FreeList(self._blocks)
        self._found_by_hash: dict[BlockHash, Block] = {}
        self._tails: dict[BlockHash, list[Block]] = {}  # by the hash of what comes before, oldest first
        self._listener = listener

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, block_hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks of the longest cached prefix, still without a reference: `hold` them at once."""
        found: list[BlockId] = []
        for block_hash in block_hashes:
            block = self._found_by_hash.get(block_hash)
            if block is None:
                break
            found.append(block.block_id)
        return found

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        return sum(self._blocks[block_id].num_references == 0 for block_id in block_ids)

    def hold(self, block_ids: Iterable[BlockId]) -> None:
        """Adds one reference to each, and revives those that were free."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.num_references == 0:
                self._free.remove(block)
            block.num_references += 1

    def take(self, num_blocks: int) -> list[BlockId]:
        """Blocks for new content, each with one reference; what they held is forgotten.

        The caller has compared `num_free_blocks` before.
        """
        taken: list[BlockId] = []
        for _ in range(num_blocks):
            block = self._free.pop_oldest()
            if block.block_hash is not None:
                del self._found_by_hash[block.block_hash]
                if self._listener is not None:
                    self._listener.removed(block.block_hash)
                block.block_hash = None
            self._forget_tail(block)
            block.num_references = 1
            taken.append(block.block_id)
        return taken

    def release(self, block_ids: list[BlockId]) -> None:
        """Drops one reference from each block of a table.

        Last block first: the end of a sequence is evicted before its beginning, because a prefix is
        of use without what followed it, and not the other way round.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.num_references > 0, f"block {block_id} is released twice"
            block.num_references -= 1
            if block.num_references == 0:
                self._free.append(block)

    def publish(self, sequence: Sequence, index: int) -> None:
        """Lets block `index` of the sequence be found by its content, which must have been computed.

        Does nothing when another block of that content can be found already.
        """
        block = self._blocks[sequence.block_ids[index]]
        block_hash = sequence.block_hashes[index]
        assert block.num_references > 0, f"block {block.block_id} is published but held by nobody"
        if block_hash not in self._found_by_hash:
            assert block.block_hash is None, f"block {block.block_id} is published with two contents"
            block.block_hash = block_hash
            self._found_by_hash[block_hash] = block
            if self._listener is not None:
                self._listener.stored(sequence, index)

    def find_tail(self, parent: BlockHash, token_ids: list[int]) -> tuple[BlockId, int] | None:
        """The block after `parent` that begins with most of these tokens, and with how many of them."""
        best: tuple[BlockId, int] | None = None
        to_beat = token_ids[:1]  # a better one begins with these
        for block in self._tails.get(parent, ()):
            if block.tail_token_ids[: len(to_beat)] != to_beat:
                continue
            num_equal = len(to_beat)
            for token_id, other in zip(block.tail_token_ids[num_equal:], token_ids[num_equal:], strict=False):
                if token_id != other:
                    break
                num_equal += 1
            best = (block.block_id, num_equal)
            if num_equal == len(token_ids):
                break
            to_beat = token_ids[: num_equal + 1]
        return best

    def publish_tail(self, block_id: BlockId, parent: BlockHash, token_ids: list[int]) -> None:
        """Lets a block that is not full be found by its first tokens, which must have been computed.

        Whoever holds the block may go on writing behind them. Does nothing where that can be found already.
        """
        tails = self._tails.setdefault(parent, [])
        if any(other.tail_token_ids[: len(token_ids)] == token_ids for other in tails):
            return
        block = self._blocks[block_id]
        self._forget_tail(block)
        for other in list(tails):
            if other.num_references == 0 and token_ids[: len(other.tail_token_ids)] == other.tail_token_ids:
                self._discard_tail(other)
        if len(tails) == _MAX_TAILS:
            self._discard_tail(tails[0])
        self._tails.setdefault(parent, []).append(block)
        block.tail_parent, block.tail_token_ids = parent, token_ids

    def forget_tail(self, parent: BlockHash, token_ids: list[int]) -> None:
        """Nobody will want a block that begins with all of these tokens. One that is held stays."""
        for block in self._tails.get(parent, ()):
            if block.tail_token_ids == token_ids and block.num_references == 0:
                self._discard_tail(block)
                return

    def reset_prefix_cache(self) -> int:
        """Forgets the content of all blocks, also of those that are referenced; returns how many had one.

        References stay, so tables are not touched. Nor is the free list: its order no longer means
        anything, but any order serves.
        """
        num_forgotten = len(self._found_by_hash)
        for block in self._found_by_hash.values():
            block.block_hash = None
        self._found_by_hash.clear()
        for tails in list(self._tails.values()):
            for block in list(tails):
                self._forget_tail(block)
        if self._listener is not None:
            self._listener.cleared()
        return num_forgotten

    def cached_hashes(self) -> set[BlockHash]:
        """All that can be found."""
        return set(self._found_by_hash)

    def free_order(self) -> list[BlockId]:
        """The free blocks, the next to be taken first."""
        return [block.block_id for block in self._free.blocks()]

    def check(self, tables: Iterable[list[BlockId]]) -> None:
        """Asserts the pool's invariants, `tables` being all block tables that exist."""
        references: Counter[BlockId] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            references.update(table)
        free = set(self.free_order())
        assert len(free) == self.num_free_blocks, "the free list holds a block twice"
        for block in self._blocks:
            block_id = block.block_id
            assert block.num_references == references[block_id], (
                f"block {block_id} counts {block.num_references} references, not {references[block_id]}"
            )
            assert (block.num_references == 0) == (block_id in free), (
                f"block {block_id}: {block.num_references} references, on the free list: {block_id in free}"
            )
            if block.block_hash is not None:
                assert self._found_by_hash.get(block.block_hash) is block, f"block {block_id} cannot be found"
            if block.tail_parent is not None:
                assert block in self._tails[block.tail_parent], f"the tail of block {block_id} is lost"
        num_tails = sum(block.tail_parent is not None for block in self._blocks)
        assert num_tails == sum(map(len, self._tails.values())), "a tail leads to a block without one"
        named = sum(block.block_hash is not None for block in self._blocks)
        assert named == len(self._found_by_hash), "a hash leads to a block that does not have it"

    def _discard_tail(self, block: Block) -> None:
        """Forgets a tail that is not needed any more. Its block goes first, lest it outlives what is."""
        self._forget_tail(block)
        if block.num_references == 0 and block.block_hash is None:
            self._free.remove(block)
            self._free.prepend(block)

    def _forget_tail(self, block: Block) -> None:
        if block.tail_parent is not None:
            tails = self._tails[block.tail_parent]
            tails.remove(block)
            if not tails:
                del self._tails[block.tail_parent]
            block.tail_parent, block.tail_token_ids = None, []


def root_hash(cache_salt: str, adapter: str = "") -> BlockHash:
    """The parent of a first block: sequences share blocks only under an equal salt and adapter.

    The adapter enters as BLAKE2b's personalisation, apart from the content, so that no salt can be
    chosen to stand for another adapter.
    """
    personalisation = hashlib.blake2b(adapter.encode(), digest_size=_HASH_BYTES).digest() if adapter else b""
    content = b"headrace\0" + cache_salt.encode()
    return BlockHash(hashlib.blake2b(content, digest_size=_HASH_BYTES, person=personalisation).digest())


def chained_hash(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    """BLAKE2b of the parent's hash and the tokens (uint32, little-endian).

    The chain makes the hash stand for the whole history, as keys and values do. Free of process
    state, so that all engines, and whoever listens to them, agree on it.
    """
    content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest())


def extend_block_hashes(sequence: Sequence, block_size: int) -> None:
    """Brings `sequence.block_hashes` up to all full blocks of its tokens."""
    hashes = sequence.block_hashes
    num_full_blocks = sequence.num_tokens // block_size
    if len(hashes) == num_full_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(sequence.cache_salt, sequence.adapter)
    for index in range(len(hashes), num_full_blocks):
        parent = chained_hash(parent, sequence.token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(parent)
