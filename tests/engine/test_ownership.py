"""Generations and pins over vLLM's own block pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool

from retire.core.errors import InvariantViolation
from retire.core.types import BlockRef, Holding, RequestId, TenantId, TokenCount
from retire.kv.ownership import Ownership

BLOCKS = 12


class Pool:
    """The pool, with the hook that the `block_generation` patch puts into it."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=4)
        self.own = Ownership(self.pool)

    def take(self, count: int) -> list:
        blocks = self.pool.get_new_blocks(count)
        self.own.allocated(blocks)
        return blocks

    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def holding(self, *groups: list, request: str = "r") -> Holding:
        refs = tuple(self.own.refs(group, len(group)) for group in groups)
        return Holding(RequestId(request), TenantId("t"), (), TokenCount(0), "f", refs)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_every_allocation_is_a_new_generation_and_only_that(pool: Pool) -> None:
    blocks = pool.take(3)
    ids = [block.block_id for block in blocks]
    assert [pool.own.generation(i) for i in ids] == [1, 1, 1]
    others = set(range(BLOCKS)) - set(ids)
    assert {pool.own.generation(i) for i in others} == {0}
    pool.pool.touch(blocks)
    pool.pool.free_blocks(reversed(blocks))
    pool.pool.free_blocks(reversed(blocks))
    assert [pool.own.generation(i) for i in ids] == [1, 1, 1]
    again = pool.take(BLOCKS - 1)
    assert {pool.own.generation(block.block_id) for block in again if block.block_id in ids} == {2}


def test_references_name_block_and_generation_up_to_the_frontier(pool: Pool) -> None:
    pool.pool.free_blocks(pool.take(BLOCKS - 1))
    blocks = pool.take(4)
    refs = pool.own.refs(blocks, 2)
    assert refs == tuple(BlockRef(block.block_id, 2) for block in blocks[:2])
    assert len(pool.own.refs(blocks, 99)) == 4
    assert pool.own.refs(iter(blocks), 0) == ()


def test_the_null_block_is_no_reference_and_is_never_pinned(pool: Pool) -> None:
    null = pool.pool.null_block
    blocks = [null, *pool.take(2)]
    refs = pool.own.refs(blocks, 3)
    assert refs[0] is None
    before = null.ref_cnt
    holding = pool.holding(blocks)
    pool.own.pin(holding)
    assert null.ref_cnt == before
    assert pool.own.pinned_blocks() == 2
    assert pool.own.block_of(None) is null
    assert [pool.own.block_of(ref) for ref in refs] == blocks
    pool.own.release(holding)
    assert null.ref_cnt == before


def test_pin_and_release_balance(pool: Pool) -> None:
    full, window = pool.take(3), pool.take(2)
    holding = pool.holding(full, window)
    pool.own.pin(holding)
    assert {block.ref_cnt for block in full + window} == {2}
    assert pool.own.pinned_blocks() == 5
    pool.pool.free_blocks(reversed(full + window))  # the writer leaves
    assert pool.free() == BLOCKS - 1 - 5
    pool.own.release(holding)
    assert pool.free() == BLOCKS - 1
    assert pool.own.pinned_blocks() == 0


def test_pinned_blocks_are_never_handed_out(pool: Pool) -> None:
    blocks = pool.take(4)
    pool.own.pin(pool.holding(blocks))
    pool.pool.free_blocks(reversed(blocks))
    rest = pool.take(pool.free())
    assert not {b.block_id for b in rest} & {b.block_id for b in blocks}
    assert {pool.own.generation(block.block_id) for block in blocks} == {1}
    with pytest.raises(ValueError, match="free blocks"):
        pool.take(1)


def test_a_released_sequence_is_reused_from_its_tail(pool: Pool) -> None:
    pool.take(BLOCKS - 1 - 4)
    blocks = pool.take(4)
    hashes = [f"{index:032d}".encode() for index in range(4)]
    pool.pool.cache_full_blocks(SimpleNamespace(request_id="r", block_hashes=hashes), blocks, 0, 4, 4, 0)
    holding = pool.holding(blocks)
    pool.own.pin(holding)
    pool.pool.free_blocks(reversed(blocks))
    pool.own.release(holding)
    assert pool.take(4) == blocks[::-1]


def test_blocks_of_two_pins_stay_until_both_are_gone(pool: Pool) -> None:
    blocks = pool.take(3)
    first, second = pool.holding(blocks, request="a"), pool.holding(blocks[:2], request="b")
    pool.own.pin(first)
    pool.own.pin(second)
    pool.pool.free_blocks(reversed(blocks))
    assert pool.own.pinned_blocks() == 3
    pool.own.release(first)
    assert [block.ref_cnt for block in blocks] == [1, 1, 0]
    assert pool.own.pinned_blocks() == 2
    pool.own.release(second)
    assert pool.free() == BLOCKS - 1


def test_a_second_pin_changes_nothing(pool: Pool) -> None:
    blocks = pool.take(2)
    holding = pool.holding(blocks)
    pool.own.pin(holding)
    with pytest.raises(InvariantViolation, match="invariant 6"):
        pool.own.pin(holding)
    assert {block.ref_cnt for block in blocks} == {2}


def test_a_second_release_changes_nothing(pool: Pool) -> None:
    blocks = pool.take(2)
    holding = pool.holding(blocks)
    with pytest.raises(InvariantViolation, match="invariant 6"):
        pool.own.release(holding)
    pool.own.pin(holding)
    pool.own.release(holding)
    with pytest.raises(InvariantViolation, match="invariant 6"):
        pool.own.release(holding)
    assert {block.ref_cnt for block in blocks} == {1}


def test_an_empty_holding_can_be_pinned_and_released(pool: Pool) -> None:
    holding = pool.holding([])
    pool.own.pin(holding)
    assert pool.own.pinned_blocks() == 0
    pool.own.release(holding)
    with pytest.raises(InvariantViolation):
        pool.own.release(holding)


def test_a_pin_of_free_blocks_takes_them_out_of_the_queue(pool: Pool) -> None:
    """Blocks that nobody references but that still hold their content, as a hit in the prefix cache finds them."""
    blocks = pool.take(2)
    holding = pool.holding(blocks)
    pool.pool.free_blocks(reversed(blocks))
    pool.own.pin(holding)
    assert pool.free() == BLOCKS - 1 - 2
    pool.own.release(holding)
    assert pool.free() == BLOCKS - 1
