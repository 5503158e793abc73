"""The block pool: order of the free list, references, and what can be found by its content."""

from __future__ import annotations

import pytest

from engine_service.block_pool import BlockPool, chained_hash, extend_block_hashes, root_hash
from engine_service.sequence import BlockHash, Sequence
from shared.identifiers import RequestId, TenantId
from tests.unit.worlds import make_sampling


def make_hashes(count: int, salt: str = "") -> list[BlockHash]:
    hashes: list[BlockHash] = []
    for index in range(count):
        hashes.append(chained_hash(hashes[-1] if hashes else root_hash(salt), [index, index + 1]))
    return hashes


def make_sequence(token_ids: list[int], cache_salt: str = "") -> Sequence:
    return Sequence(
        RequestId("r"), token_ids, len(token_ids), make_sampling(), TenantId("acme"), cache_salt=cache_salt
    )


def test_blocks_are_taken_oldest_first_and_come_back_last_block_first() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    table = pool.take(3)
    assert table == [0, 1, 2]
    pool.release(table)
    assert pool.free_order() == [3, 4, 2, 1, 0]
    pool.check([])


def test_a_free_block_can_be_found_until_somebody_takes_it() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    hashes = make_hashes(2)
    table = pool.take(2)
    for block_id, block_hash in zip(table, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.release(table)
    assert pool.cached_prefix(hashes) == table
    pool.take(2)  # block 2, then the end of the cached prefix
    assert pool.cached_prefix(hashes) == table[:1]
    pool.take(1)
    assert pool.cached_prefix(hashes) == []


def test_a_prefix_ends_at_the_first_block_that_is_missing() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    first, second, third = make_hashes(3)
    table = pool.take(2)
    pool.publish(table[0], first)
    pool.publish(table[1], third)
    assert pool.cached_prefix([first, second, third]) == table[:1]


def test_a_hit_revives_a_block_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    table = pool.take(3)
    pool.publish(table[1], make_hashes(1)[0])
    pool.release(table)
    assert pool.free_order() == [3, 2, 1, 0]
    hit = pool.cached_prefix(make_hashes(1))
    pool.hold(hit)
    assert pool.free_order() == [3, 2, 0]
    pool.check([hit])


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    table = pool.take(1)
    pool.publish(table[0], make_hashes(1)[0])
    pool.hold(table)
    pool.check([table, table[:]])
    pool.release(table)
    assert pool.num_free_blocks == 1
    pool.release(table)
    assert pool.num_free_blocks == 2


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(table)


def test_of_two_equal_blocks_the_first_published_is_the_one_found() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    block_hash = make_hashes(1)[0]
    first, second = pool.take(2)
    pool.publish(first, block_hash)
    pool.publish(second, block_hash)
    assert pool.cached_prefix([block_hash]) == [first]
    pool.check([[first], [second]])


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
    for sequence in (same, other, salted):
        extend_block_hashes(sequence, 2)
    assert len(same.block_hashes) == 2  # the fifth token fills no block
    assert len({*same.block_hashes, *other.block_hashes, *salted.block_hashes}) == 6


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
