"""The block pool: order of the free list, references, and what can be found by its content."""

from __future__ import annotations

from typing import Any

import pytest

from engine_service.block_pool import BlockPool, chained_hash, extend_block_hashes, root_hash
from engine_service.sequence import BlockId, Sequence
from shared.identifiers import RequestId, TenantId
from tests.unit.worlds import make_sampling


def make_sequence(token_ids: list[int], **options: Any) -> Sequence:
    return Sequence(RequestId("r"), token_ids, len(token_ids), make_sampling(), TenantId("acme"), **options)


def take_sequence(pool: BlockPool, num_blocks: int) -> Sequence:
    """A sequence with so many full blocks; the content is always the same."""
    sequence = make_sequence(list(range(num_blocks * pool.block_size)), block_ids=pool.take(num_blocks))
    extend_block_hashes(sequence, pool.block_size)
    return sequence


def take_published(pool: BlockPool, num_blocks: int) -> Sequence:
    sequence = take_sequence(pool, num_blocks)
    for index in range(num_blocks):
        pool.publish(sequence, index)
    return sequence


def test_blocks_are_taken_oldest_first_and_come_back_last_block_first() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    table = pool.take(3)
    assert table == [0, 1, 2]
    pool.release(table)
    assert pool.free_order() == [3, 4, 2, 1, 0]
    pool.check([])


def test_a_free_block_can_be_found_until_somebody_takes_it() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    sequence = take_published(pool, 2)
    table, hashes = sequence.block_ids, sequence.block_hashes
    pool.release(table)
    assert pool.cached_prefix(hashes) == table
    pool.take(2)  # block 2, then the end of the cached prefix
    assert pool.cached_prefix(hashes) == table[:1]
    pool.take(1)
    assert pool.cached_prefix(hashes) == []


def test_a_prefix_ends_at_the_first_block_that_is_missing() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    sequence = take_sequence(pool, 3)
    pool.publish(sequence, 0)
    pool.publish(sequence, 2)
    assert pool.cached_prefix(sequence.block_hashes) == sequence.block_ids[:1]


def test_a_hit_revives_a_block_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    sequence = take_sequence(pool, 3)
    pool.publish(sequence, 1)
    pool.release(sequence.block_ids)
    assert pool.free_order() == [3, 2, 1, 0]
    hit = pool.cached_prefix(sequence.block_hashes[1:])
    pool.hold(hit)
    assert pool.free_order() == [3, 2, 0]
    pool.check([hit])


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    table = take_published(pool, 1).block_ids
    pool.hold(table)
    pool.check([table, table[:]])
    pool.release(table)
    assert pool.num_free_blocks == 1
    pool.release(table)
    assert pool.num_free_blocks == 2


def publish_tails(pool: BlockPool, tails: list[list[int]]) -> list[BlockId]:
    """A block for each, free afterwards."""
    table = pool.take(len(tails))
    for block_id, token_ids in zip(table, tails, strict=True):
        pool.publish_tail(block_id, root_hash(""), token_ids)
    for block_id in table:
        pool.release([block_id])
    return table


def test_the_tail_with_most_of_the_tokens_is_found() -> None:
    pool = BlockPool(num_blocks=5, block_size=8)
    short, long, longest = publish_tails(pool, [[1, 9], [1, 2, 3, 9], [1, 2, 3, 4, 5]])
    root = root_hash("")
    assert pool.find_tail(root, [1, 2, 3, 9, 7]) == (long, 4)
    assert pool.find_tail(root, [1, 2, 3, 4, 7]) == (longest, 4)
    assert pool.find_tail(root, [1, 2, 3, 4]) == (longest, 4)
    assert pool.find_tail(root, [1, 2]) == (long, 2)
    assert pool.find_tail(root, [1, 9, 9]) == (short, 2)
    assert pool.find_tail(root, [2]) is None
    assert pool.find_tail(root_hash("other"), [1, 2]) is None
    pool.check([])


def test_a_free_tail_yields_to_one_that_goes_on_behind_it_and_its_block_is_taken_first() -> None:
    pool = BlockPool(num_blocks=4, block_size=8)
    begin, other = publish_tails(pool, [[1, 2], [5, 6]])
    (longer,) = pool.take(1)
    pool.publish_tail(longer, root_hash(""), [1, 2, 3])
    assert pool.free_order() == [begin, 3, other]
    assert pool.find_tail(root_hash(""), [1, 2, 4]) == (longer, 2)
    pool.check([[longer]])


def test_a_held_tail_stays_beside_one_that_goes_on_behind_it() -> None:
    pool = BlockPool(num_blocks=3, block_size=8)
    held, longer = pool.take(2)
    pool.publish_tail(held, root_hash(""), [1, 2])
    pool.publish_tail(longer, root_hash(""), [1, 2, 3])
    pool.release([longer])
    pool.take(2)
    assert pool.find_tail(root_hash(""), [1, 2, 3]) == (held, 2)


def test_a_tail_can_be_given_up() -> None:
    pool = BlockPool(num_blocks=3, block_size=8)
    first, second = publish_tails(pool, [[1, 2], [5, 6]])
    pool.forget_tail(root_hash(""), [5])
    pool.forget_tail(root_hash(""), [5, 6])
    assert pool.find_tail(root_hash(""), [5, 6]) is None
    assert pool.find_tail(root_hash(""), [1, 2]) == (first, 2)
    assert pool.free_order()[0] == second
    pool.check([])


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(table)


def test_of_two_equal_blocks_the_first_published_is_the_one_found() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    first, second = take_published(pool, 1), take_published(pool, 1)
    assert first.block_hashes == second.block_hashes
    assert pool.cached_prefix(first.block_hashes) == first.block_ids
    pool.check([first.block_ids, second.block_ids])


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1], [1]], [[0, 0]]])
def test_check_notices_tables_that_do_not_add_up(tables: list[list[int]]) -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.check(tables)  # type: ignore[arg-type]


def test_the_hash_of_a_block_stands_for_everything_before_it() -> None:
    same = make_sequence([1, 2, 3, 4, 5])
    other = make_sequence([9, 2, 3, 4, 5])
    salted = make_sequence([1, 2, 3, 4, 5], cache_salt="tenant")
    adapted = make_sequence([1, 2, 3, 4, 5], adapter="tenant")
    both = make_sequence([1, 2, 3, 4, 5], cache_salt="tenant", adapter="tenant")
    sequences = (same, other, salted, adapted, both)
    for sequence in sequences:
        extend_block_hashes(sequence, 2)
    assert len(same.block_hashes) == 2  # the fifth token fills no block
    assert len({block_hash for sequence in sequences for block_hash in sequence.block_hashes}) == 10


def test_no_salt_can_be_chosen_that_stands_for_an_adapter() -> None:
    salts = ["", "a", "b", "ab", "a\0b", "\0a", "headrace\0", "a" * 200]
    roots = {root_hash(salt, adapter) for salt in salts for adapter in ["", "a", "b", "ab", "a" * 200]}
    assert len(roots) == len(salts) * 5


def test_a_reset_forgets_held_and_free_blocks_and_leaves_the_references() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    sequence = take_published(pool, 3)
    pool.release(sequence.block_ids[2:])
    assert pool.reset_prefix_cache() == 3
    assert pool.reset_prefix_cache() == 0
    assert pool.cached_prefix(sequence.block_hashes) == []
    pool.check([sequence.block_ids[:2]])
    pool.publish(sequence, 0)  # whether it still may is the scheduler's business
    assert pool.cached_prefix(sequence.block_hashes) == sequence.block_ids[:1]


def test_hashes_that_grow_with_the_sequence_equal_those_of_the_whole() -> None:
    grown = make_sequence([1, 2, 3])
    extend_block_hashes(grown, 2)
    grown.token_ids += [4, 5, 6]
    extend_block_hashes(grown, 2)
    whole = make_sequence([1, 2, 3, 4, 5, 6])
    extend_block_hashes(whole, 2)
    assert grown.block_hashes == whole.block_hashes


def test_the_hash_is_fixed_for_all_engines() -> None:
    assert chained_hash(root_hash(""), [1, 2, 3]).hex() == "59e07ce4269f967fd072c47a945a4b9a"
