"""Generations and pins over vLLM's own block pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool

from retire.core.errors import InvariantViolation
from retire.core.types import BlockRef, Holding, KVGroup, RequestId, TenantId, TokenCount
from retire.kv.ownership import Ownership, Quota

BLOCKS = 12


class Pool:
    """The pool, with the hook that the `block_generation` patch puts into it."""

    def __init__(self, quota: Quota | None = None, limit: int = BLOCKS) -> None:
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=4)
        self.quotas: dict[str, Quota] = {}
        self.own = Ownership(self.pool, lambda tenant: self.quotas.get(tenant, quota or Quota(BLOCKS)), limit)

    def take(self, count: int) -> list:
        blocks = self.pool.get_new_blocks(count)
        self.own.allocated(blocks)
        return blocks

    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def holding(self, *groups: list, request: str = "r", tenant: str = "t") -> Holding:
        refs = tuple(tuple(self.own.ref(block) for block in group) for group in groups)
        return Holding(RequestId(request), TenantId(tenant), (), TokenCount(0), "f", refs)

    def pin(self, holding: Holding) -> Holding | None:
        return self.own.pin(holding, holding, [KVGroup(4)] * len(holding.groups))


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


def test_a_reference_is_void_once_its_block_has_another_owner(pool: Pool) -> None:
    pool.pool.free_blocks(pool.take(BLOCKS - 1))
    blocks = pool.take(4)
    refs = [pool.own.ref(block) for block in blocks]
    assert refs == [BlockRef(block.block_id, 2) for block in blocks]
    assert all(pool.own.holds(ref) for ref in refs)
    pool.pool.free_blocks(reversed(blocks))
    assert all(pool.own.holds(ref) for ref in refs), "free, and nobody else's yet"
    pool.take(BLOCKS - 1)
    assert not any(pool.own.holds(ref) for ref in refs)


def test_the_null_block_is_no_reference_and_is_never_pinned(pool: Pool) -> None:
    null = pool.pool.null_block
    blocks = [null, *pool.take(2)]
    refs = [pool.own.ref(block) for block in blocks]
    assert refs[0] is None
    before = null.ref_cnt
    holding = pool.holding(blocks)
    pool.pin(holding)
    assert null.ref_cnt == before
    assert pool.own.pinned_blocks() == 2
    assert pool.own.block_of(None) is null
    assert [pool.own.block_of(ref) for ref in refs] == blocks
    pool.own.release(holding.request)
    assert null.ref_cnt == before


def test_pin_and_release_balance(pool: Pool) -> None:
    full, window = pool.take(3), pool.take(2)
    holding = pool.holding(full, window)
    pool.pin(holding)
    assert {block.ref_cnt for block in full + window} == {2}
    assert pool.own.pinned_blocks() == 5
    pool.pool.free_blocks(reversed(full + window))  # the writer leaves
    assert pool.free() == BLOCKS - 1 - 5
    pool.own.release(holding.request)
    assert pool.free() == BLOCKS - 1
    assert pool.own.pinned_blocks() == 0


def test_pinned_blocks_are_never_handed_out(pool: Pool) -> None:
    blocks = pool.take(4)
    pool.pin(pool.holding(blocks))
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
    pool.pin(holding)
    pool.pool.free_blocks(reversed(blocks))
    pool.own.release(holding.request)
    assert pool.take(4) == blocks[::-1]


def test_blocks_of_two_pins_stay_until_both_are_gone(pool: Pool) -> None:
    blocks = pool.take(3)
    first, second = pool.holding(blocks, request="a"), pool.holding(blocks[:2], request="b")
    pool.pin(first)
    pool.pin(second)
    pool.pool.free_blocks(reversed(blocks))
    assert pool.own.pinned_blocks() == 3
    pool.own.release(first.request)
    assert [block.ref_cnt for block in blocks] == [1, 1, 0]
    assert pool.own.pinned_blocks() == 2
    pool.own.release(second.request)
    assert pool.free() == BLOCKS - 1


def test_a_second_pin_changes_nothing(pool: Pool) -> None:
    blocks = pool.take(2)
    holding = pool.holding(blocks)
    pool.pin(holding)
    with pytest.raises(InvariantViolation, match="invariant 6"):
        pool.pin(holding)
    assert {block.ref_cnt for block in blocks} == {2}


def test_a_second_release_changes_nothing(pool: Pool) -> None:
    blocks = pool.take(2)
    holding = pool.holding(blocks)
    with pytest.raises(InvariantViolation, match="invariant 6"):
        pool.own.release(holding.request)
    pool.pin(holding)
    pool.own.release(holding.request)
    with pytest.raises(InvariantViolation, match="invariant 6"):
        pool.own.release(holding.request)
    assert {block.ref_cnt for block in blocks} == {1}


def test_an_empty_holding_can_be_pinned_and_released(pool: Pool) -> None:
    holding = pool.holding([])
    pool.pin(holding)
    assert pool.own.pinned_blocks() == 0
    pool.own.release(holding.request)
    with pytest.raises(InvariantViolation):
        pool.own.release(holding.request)


def test_a_pin_of_free_blocks_takes_them_out_of_the_queue(pool: Pool) -> None:
    """Blocks that nobody references but that still hold their content, as a hit in the prefix cache finds them."""
    blocks = pool.take(2)
    holding = pool.holding(blocks)
    pool.pool.free_blocks(reversed(blocks))
    pool.pin(holding)
    assert pool.free() == BLOCKS - 1 - 2
    pool.own.release(holding.request)
    assert pool.free() == BLOCKS - 1


# -- quotas -----------------------------------------------------------------------------------------------------------


def test_the_head_of_a_sequence_is_guaranteed_first_over_all_groups() -> None:
    pool = Pool(Quota(3))
    first, second = pool.take(3), pool.take(3)
    kept = pool.pin(pool.holding(first, second))
    assert kept is not None
    assert not kept.guaranteed
    assert [block.ref_cnt for block in first + second] == [2, 2, 1, 2, 1, 1]


def test_a_block_that_two_pins_of_a_tenant_keep_counts_once() -> None:
    pool = Pool(Quota(4))
    blocks = pool.take(4)
    assert pool.pin(pool.holding(blocks, request="a")).guaranteed
    assert pool.pin(pool.holding(blocks[:3], request="b")).guaranteed
    pool.own.release("a")
    assert pool.pin(pool.holding(pool.take(2), request="c")).guaranteed is False
    pool.own.release("b")
    pool.own.release("c")
    assert pool.own.pinned_blocks() == 0


def test_tenants_have_quotas_of_their_own() -> None:
    pool = Pool(Quota(2))
    assert pool.pin(pool.holding(pool.take(2), request="a", tenant="x")).guaranteed
    assert pool.pin(pool.holding(pool.take(2), request="b", tenant="y")).guaranteed
    assert not pool.pin(pool.holding(pool.take(1), request="c", tenant="x")).guaranteed


def test_all_pins_together_leave_room_for_ordinary_work() -> None:
    pool = Pool(limit=3)
    assert pool.pin(pool.holding(pool.take(2), request="a", tenant="x")).guaranteed
    assert not pool.pin(pool.holding(pool.take(2), request="b", tenant="y")).guaranteed
    assert pool.own.pinned_blocks() == 3


@pytest.mark.parametrize("quota", [Quota(0), Quota(0, beyond=False), Quota(1, beyond=False)])
def test_what_may_not_be_kept_is_not_pinned(quota: Quota) -> None:
    pool = Pool(quota)
    blocks = pool.take(2)
    assert pool.pin(pool.holding(blocks)) is None
    assert {block.ref_cnt for block in blocks} == {1}
    assert pool.own.pinned_blocks() == 0


def test_a_pin_ignores_blocks_that_are_somebody_elses_by_now(pool: Pool) -> None:
    blocks = pool.take(2)
    holding = pool.holding(blocks)
    pool.pool.free_blocks(reversed(blocks))
    taken = pool.take(BLOCKS - 1)
    assert pool.pin(holding).guaranteed
    assert {block.ref_cnt for block in taken} == {1}
    pool.own.release(holding.request)


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_copy_keeps_what_it_reads_whatever_becomes_of_the_pins(pool: Pool) -> None:
    blocks = pool.take(3)
    holding = pool.holding(blocks)
    pool.pin(holding)
    assert pool.own.begin_copy(holding) == holding.groups
    pool.pool.free_blocks(reversed(blocks))
    pool.own.release(holding.request)
    assert pool.own.pinned_blocks() == 3
    assert not {b.block_id for b in pool.take(pool.free())} & {b.block_id for b in blocks}
    pool.own.end_copy(holding.request)
    pool.own.end_copy(holding.request)
    assert pool.own.pinned_blocks() == 0


def test_a_block_that_was_reused_is_not_copied(pool: Pool) -> None:
    blocks = pool.take(3)
    holding = pool.holding(blocks)
    pool.pool.free_blocks([blocks[1]])
    pool.take(BLOCKS - 1 - 2)
    (alive,) = pool.own.begin_copy(holding)
    assert [ref is None for ref in alive] == [False, True, False]
    assert pool.own.pinned_blocks() == 2
    pool.own.end_copy(holding.request)
    assert pool.own.pinned_blocks() == 0
