"""Slots of host memory: who owns which, and when one may be written again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retire.core.errors import InvariantViolation
from retire.core.types import RequestId, TenantId
from retire.kv.host import ALIGNMENT_BYTES, Copy, HostPages, NoRoom

SLOT = 2 * ALIGNMENT_BYTES
PAGE_BYTES = (SLOT, SLOT - ALIGNMENT_BYTES - 1)  # a group of smaller pages
A, B = TenantId("a"), TenantId("b")


def pages(slots: int, **shares: int) -> HostPages:
    return HostPages(slots * SLOT + 1, PAGE_BYTES, shares.get)


def taken(pool: HostPages, name: str, count: int, *, tenant: TenantId = A, until: int = 100, now: int = 0) -> Copy:
    copy = pool.reserve(RequestId(name), tenant, ((object(),) * count, (None,)), until, now)
    assert isinstance(copy, Copy)
    return copy


def refused(pool: HostPages, name: str, count: int, *, tenant: TenantId = A, now: int = 0) -> NoRoom:
    refusal = pool.reserve(RequestId(name), tenant, ((object(),) * count,), 100, now)
    assert isinstance(refusal, NoRoom)
    return refusal


def test_a_page_that_the_source_does_not_have_takes_no_slot():
    pool = pages(2)
    copy = pool.reserve(RequestId("r"), A, ((None, object()), (object(), None)), 100, 0)
    assert isinstance(copy, Copy)
    assert [[slot is None for slot in group] for group in copy.slots] == [[True, False], [False, True]]
    assert pool.bytes_in_use == 2 * SLOT


def test_a_full_tier_refuses_and_evicts_nobody_who_has_not_expired():
    pool = pages(3)
    taken(pool, "old", 2, until=10)
    assert refused(pool, "new", 2, now=9) is NoRoom.BUDGET
    assert pool.get(RequestId("old")) is not None


def test_an_expired_copy_makes_room_but_not_while_a_transfer_uses_it():
    pool = pages(3)
    used = taken(pool, "used", 2, until=10)
    pool.hold(used)
    assert refused(pool, "new", 2, now=10) is NoRoom.BUDGET
    pool.release(used)
    taken(pool, "new", 2, now=10)
    assert pool.get(RequestId("used")) is None
    assert pool.evicted_pages == 2


def test_an_expired_copy_stays_as_long_as_there_is_room():
    pool = pages(3)
    taken(pool, "old", 1, until=10)
    taken(pool, "new", 2, now=11)
    assert pool.get(RequestId("old")) is not None


def test_a_tenant_over_its_share_is_refused_while_others_have_room():
    pool = pages(4, a=2 * SLOT)
    taken(pool, "one", 2)
    assert refused(pool, "two", 1) is NoRoom.TENANT
    taken(pool, "other", 2, tenant=B)
    pool.drop(RequestId("one"))
    taken(pool, "two", 1)


def test_a_dropped_copy_keeps_its_slots_until_the_last_transfer_has_ended():
    pool = pages(2)
    copy = taken(pool, "r", 2)
    pool.hold(copy)
    pool.hold(copy)
    pool.drop(RequestId("r"))
    pool.release(copy)
    assert refused(pool, "new", 1) is NoRoom.BUDGET
    pool.release(copy)
    taken(pool, "new", 2)


def test_what_cannot_be_is_a_defect():
    pool = pages(2)
    copy = taken(pool, "r", 1)
    with pytest.raises(InvariantViolation, match="twice"):
        taken(pool, "r", 1)
    with pytest.raises(InvariantViolation, match="nobody"):
        pool.release(copy)
    pool.drop(RequestId("stranger"))


class AnyOrder(RuleBasedStateMachine):
    """Copies, drops and transfers in any order."""

    SLOTS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = pages(self.SLOTS, a=4 * SLOT)
        self.now = 0
        self.named = 0
        self.alive: list[Copy] = []  # ever reserved, slots not known to be free
        self.transfers: list[Copy] = []

    @rule(count=st.integers(0, 5), tenant=st.sampled_from((A, B)), life=st.integers(0, 4))
    def reserve(self, count: int, tenant: TenantId, life: int) -> None:
        self.now += 1
        self.named += 1
        copy = self.pool.reserve(RequestId(str(self.named)), tenant, ((object(),) * count,), self.now + life, self.now)
        self._forget_those_that_left()
        if isinstance(copy, Copy):
            self.alive.append(copy)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pool.drop(data.draw(st.sampled_from(self.alive)).source)
        self._forget_those_that_left()

    @precondition(lambda self: any(self._has(copy) for copy in self.alive))
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from([copy for copy in self.alive if self._has(copy)]))
        self.pool.hold(copy)
        self.transfers.append(copy)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1))))
        self._forget_those_that_left()

    def _has(self, copy: Copy) -> bool:
        return self.pool.get(copy.source) is copy

    def _forget_those_that_left(self) -> None:
        self.alive = [copy for copy in self.alive if self._has(copy) or copy.users]

    @invariant()
    def no_slot_has_two_owners(self) -> None:
        owners = Counter(slot for copy in self.alive for group in copy.slots for slot in group)
        assert all(count == 1 for count in owners.values())
        assert all(0 <= slot < self.SLOTS for slot in owners)
        assert self.pool.bytes_in_use == SLOT * len(owners)

    @invariant()
    def no_tenant_has_more_than_its_share(self) -> None:
        assert sum(len(copy.slots[0]) for copy in self.alive if copy.tenant == A) <= 4

    def teardown(self) -> None:
        for copy in self.transfers:
            self.pool.release(copy)
        for source in self.pool.sources():
            self.pool.drop(source)
        assert self.pool.bytes_in_use == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)
