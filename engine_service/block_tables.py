"""The block tables of running sequences: what of the cache they start on, how they grow and end.

When a hash is published: when the step that computes the block is planned. Steps are computed in the order
in which they were planned, and each layer of a step writes all keys and values before it reads any, so
whoever finds the block reads it after it was written, also within that step: sequences of one step share
a common prefix. A step that fails ends the engine, and the promise with it.

What is shared is never written again: a sequence that goes on in the middle of a shared block gets a copy
of it (copy on write), which the step makes before anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_service.block_pool import BlockPool, extend_block_hashes, root_hash
from engine_service.sequence import BlockCopy, BlockHash, BlockId, Sequence


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the cache has of a sequence: full blocks, and after them the beginning of one more."""

    block_ids: list[BlockId]
    tail_block_id: BlockId | None = None
    num_tail_tokens: int = 0


_NOTHING_CACHED = CachedPrefix([])


class BlockTables:
    """Who frees blocks: `release`, and nobody else. It empties the table, so a second call is harmless."""

    def __init__(self, pool: BlockPool, *, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._block_size = pool.block_size
        self._enable_prefix_caching = enable_prefix_caching
        # Of the step that is being planned. What it computes can be read by it, but not copied.
        self._copies: list[BlockCopy] = []
        self._published_in_step: set[BlockId] = set()

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return self._pool.num_blocks_for(num_tokens)

    # ------------------------------------------------------------------ starting on what is cached

    def find_prefix(self, sequence: Sequence) -> CachedPrefix:
        """The longest there is, but never all tokens: the last one has to be computed for its logits."""
        if not (self._enable_prefix_caching and sequence.reads_cache):
            return _NOTHING_CACHED
        extend_block_hashes(sequence, self._block_size)
        num_usable = sequence.num_tokens - 1
        num_full_blocks, num_over = divmod(num_usable, self._block_size)
        found = self._pool.cached_prefix(sequence.block_hashes[:num_full_blocks])
        if len(found) == num_full_blocks and num_over == self._block_size - 1 > 0:
            # The sequence ends with a full block, of which all tokens but the last can be used.
            for last in self._pool.cached_prefix(sequence.block_hashes[num_full_blocks:]):
                if last not in self._published_in_step:
                    return CachedPrefix(found, last, num_over)
        start = len(found) * self._block_size
        wanted = sequence.token_ids[start : min(start + self._block_size, num_usable)]
        tail = self._pool.find_tail(self._parent_hash(sequence, len(found)), wanted) if wanted else None
        return CachedPrefix(found) if tail is None else CachedPrefix(found, *tail)

    def num_free_after(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Free blocks that would be left if the sequence, with all its tokens, stood on the prefix."""
        num_needed = self._pool.num_blocks_for(sequence.num_tokens) - len(prefix.block_ids)
        return self._pool.num_free_blocks - self._pool.num_free_among(prefix.block_ids) - num_needed

    def start(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Gives a sequence without blocks those of the prefix. The caller has asked `num_free_after`."""
        self._pool.hold(prefix.block_ids)
        sequence.block_ids.extend(prefix.block_ids)
        if prefix.tail_block_id is not None:
            # It may be free, and so be taken for somebody else in this very step: copies come first.
            (copy,) = self._pool.take(1)
            self._copies.append(BlockCopy(prefix.tail_block_id, copy))
            sequence.block_ids.append(copy)
        sequence.num_computed_tokens = len(prefix.block_ids) * self._block_size + prefix.num_tail_tokens
        sequence.num_published_blocks = len(prefix.block_ids)
        sequence.may_publish = True

    def skip_cached(self, sequence: Sequence) -> None:
        """Lets a prompt that is half computed go on behind blocks that another sequence computed meanwhile.

        So sequences with a common prompt take turns in computing its chunks, whoever came first.
        """
        num_blocks = len(sequence.block_ids)
        if (
            sequence.num_missing_tokens <= self._block_size
            or not (self._enable_prefix_caching and sequence.reads_cache and sequence.may_publish)
            or num_blocks * self._block_size != sequence.num_computed_tokens
        ):
            return
        extend_block_hashes(sequence, self._block_size)
        num_usable = (sequence.num_tokens - 1) // self._block_size
        found = self._pool.cached_prefix(sequence.block_hashes[num_blocks:num_usable])
        self._pool.hold(found)
        sequence.block_ids.extend(found)
        sequence.num_computed_tokens += len(found) * self._block_size

    def finish_plan(self) -> list[BlockCopy]:
        """The copies that the planned step has to make."""
        copies, self._copies = self._copies, []
        self._published_in_step.clear()
        return copies

    # ------------------------------------------------------------------ growing and ending

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Takes the blocks for the next `num_tokens` tokens; False and none if too few are free."""
        num_blocks = self._pool.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        num_missing = num_blocks - len(sequence.block_ids)
        if num_missing > self._pool.num_free_blocks:
            return False
        if num_missing > 0:
            sequence.block_ids.extend(self._pool.take(num_missing))
        return True

    def publish(self, sequence: Sequence) -> None:
        """Lets all full blocks be found whose tokens are known and computed, or planned to be."""
        num_full_blocks = min(sequence.num_computed_tokens, sequence.num_tokens) // self._block_size
        if num_full_blocks <= sequence.num_published_blocks or not self._may_publish(sequence):
            return
        extend_block_hashes(sequence, self._block_size)
        for index in range(sequence.num_published_blocks, num_full_blocks):
            self._pool.publish(sequence, index)
            self._published_in_step.add(sequence.block_ids[index])
        sequence.num_published_blocks = num_full_blocks

    def publish_tail(self, sequence: Sequence) -> None:
        """Lets the last block be found that is not full. What it holds must be computed by a step that is
        done, or that is done before any step that is still to be planned."""
        num_known = min(sequence.num_computed_tokens, sequence.num_tokens)
        num_full_blocks, num_tail_tokens = divmod(num_known, self._block_size)
        if num_known and num_tail_tokens == 0 and sequence.search_id is not None:
            # Found by its hash, too; but so it replaces the shorter tails of the levels before.
            num_full_blocks, num_tail_tokens = num_full_blocks - 1, self._block_size
        if num_tail_tokens and self._may_publish(sequence):
            extend_block_hashes(sequence, self._block_size)
            self._pool.publish_tail(
                sequence.block_ids[num_full_blocks],
                self._parent_hash(sequence, num_full_blocks),
                sequence.token_ids[num_full_blocks * self._block_size : num_known],
            )

    def forget_tail(self, sequence: Sequence) -> None:
        """The sequence has ended, and nobody will want what `publish_tail` told of it then."""
        num_full_blocks, num_tail_tokens = divmod(sequence.num_tokens - 1, self._block_size)
        if num_tail_tokens and self._enable_prefix_caching:
            extend_block_hashes(sequence, self._block_size)
            start = num_full_blocks * self._block_size
            self._pool.forget_tail(
                self._parent_hash(sequence, num_full_blocks),
                sequence.token_ids[start : start + num_tail_tokens],
            )

    def release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.block_ids.clear()
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0

    def reset_prefix_cache(self, running: Iterable[Sequence]) -> int:
        """Forgets all cached prefixes; returns how many blocks they had.

        Nothing that was computed or planned before can be found afterwards: a sequence that runs keeps
        its blocks and goes on with them, but publishes none that stand on what came before the reset.
        """
        for sequence in running:
            sequence.may_publish = False
        return self._pool.reset_prefix_cache()

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts the invariants, `running` being all sequences that may have blocks."""
        tables = []
        for sequence in running:
            num_blocks = self._pool.num_blocks_for(sequence.num_computed_tokens)
            assert len(sequence.block_ids) == num_blocks, (
                f"{sequence.request_id}: {len(sequence.block_ids)} blocks for "
                f"{sequence.num_computed_tokens} tokens"
            )
            tables.append(sequence.block_ids)
        self._pool.check(tables)

    # ------------------------------------------------------------------ inside

    def _may_publish(self, sequence: Sequence) -> bool:
        return self._enable_prefix_caching and sequence.may_publish

    def _parent_hash(self, sequence: Sequence, index: int) -> BlockHash:
        if index:
            return sequence.block_hashes[index - 1]
        return root_hash(sequence.cache_salt, sequence.adapter)
