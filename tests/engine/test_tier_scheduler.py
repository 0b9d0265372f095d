"""Scheduler side of the DRAM tier: what the coordinator is told, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from retire.core.errors import InvariantViolation
from retire.core.types import (
    BlockId,
    BlockRef,
    Certificate,
    Generation,
    HostRef,
    KVGroup,
    PageRef,
    Refusal,
    RequestId,
    ScopeId,
    TenantId,
    Ticket,
    TokenCount,
    TransitionId,
)
from retire.core.types import Tier as Where
from retire.engine.tier_scheduler import Tier
from retire.engine.tier_wire import Ended, Orders, Reports, Result, joined
from retire.kv.host import HostPages

SLOT = 4096
FULL, WINDOW = KVGroup(4), KVGroup(4, 6)
TENANT, SOURCE, TARGET, TICKET = TenantId("t"), RequestId("source"), RequestId("target"), Ticket(0, 1, 0, 1)
Pages = tuple[tuple[PageRef, ...], ...]


def ref(block: int) -> BlockRef:
    return BlockRef(BlockId(block), Generation(1))


BLOCKS = ((ref(1), ref(2), ref(3)), (None, ref(5), ref(6)))  # the window has let the first one go


class World:
    """The tier, its workers in the test's hands, and what it called back."""

    def __init__(self, slots: int = 8, ranks: int = 1, **share: int) -> None:
        self.now = 0
        pages = HostPages(slots * SLOT, (SLOT, SLOT), share.get)
        self.tier = Tier(pages, (FULL, WINDOW), ranks, clock_ns=lambda: self.now)
        self.ranks = ranks
        self.offloaded: list[tuple[RequestId, Pages | None]] = []
        self.restored: list[tuple[RequestId, Refusal | None]] = []
        self.tier.offloaded = lambda source, groups: self.offloaded.append((source, groups))
        self.tier.restored = lambda target, refusal: self.restored.append((target, refusal))

    def report(self, job: int, ended: Ended = Ended.DONE, *, rank: int = 0, digests: tuple[int, ...] = ()) -> set[str]:
        """One rank's end of a job reaches the scheduler; who upstream then takes for failed."""
        output = SimpleNamespace(
            kv_connector_worker_meta=Reports((Result(job, rank, ended, digests, 1000, 500),)), failed_recving=set()
        )
        self.tier.settle(output)
        self.tier.settle(output)  # upstream hands the same output over once more
        return output.failed_recving

    def copied(self, source: RequestId = SOURCE, *, expires_ns: int = 100) -> Certificate:
        """A complete copy of `BLOCKS`, certified for all of its 12 tokens."""
        assert self.tier.offload(source, TENANT, BLOCKS, expires_ns)
        (order,) = self.tier.take_orders().begin
        for rank in range(self.ranks):
            self.report(order.job, rank=rank, digests=tuple(100 * rank + n for n in range(5)))
        name, groups = self.offloaded.pop()
        assert name == source
        assert groups is not None
        return Certificate(
            TENANT, ScopeId("s"), TransitionId("x"), source, TARGET, TokenCount(12), "f", groups, Where.DRAM
        )

    def scheduled(self, local_tokens: int = 0, *, first_block: int = 21) -> int | None:
        """What upstream does with the waiting target: ask, allocate, tell.  Returns the tokens to restore."""
        missing = self.tier.matched_tokens(TARGET, local_tokens)
        if missing is not None:
            table = [
                [SimpleNamespace(block_id=first_block + n, is_null=False) for n in range(3)],
                [SimpleNamespace(block_id=0 if n == 0 else first_block + 4 + n, is_null=n == 0) for n in range(3)],
            ]
            self.tier.allocated(TARGET, table, missing)
        return missing

    def restoring(self, local_tokens: int = 0) -> int:
        """A restore is with the workers; its job."""
        self.tier.expect(TARGET, TICKET, self.copied())
        self.scheduled(local_tokens)
        (order,) = self.tier.take_orders().begin
        return order.job


def test_a_copy_is_told_with_slots_and_digests_in_the_shape_of_its_blocks():
    groups = World().copied().groups
    assert [[isinstance(page, HostRef) for page in group] for group in groups] == [[True] * 3, [False, True, True]]
    pages = [page for group in groups for page in group if isinstance(page, HostRef)]
    assert [page.digest for page in pages] == [0, 1, 2, 3, 4]
    assert len({page.slot for page in pages}) == 5


def test_a_copy_is_complete_when_every_rank_says_so_and_carries_all_their_digests():
    world = World(ranks=2)
    assert world.tier.offload(SOURCE, TENANT, BLOCKS, 100)
    (order,) = world.tier.take_orders().begin
    world.report(order.job, rank=1, digests=(10, 11, 12, 13, 14))
    assert world.offloaded == []
    assert world.tier.busy
    world.report(order.job, rank=0, digests=(0, 1, 2, 3, 4))
    ((_, groups),) = world.offloaded
    assert groups is not None
    assert groups[1][2].digest == joined((4, 14))
    assert not world.tier.busy


def test_orders_are_given_once_and_an_idle_step_carries_none():
    world = World()
    idle = world.tier.take_orders()
    assert idle == Orders()
    world.tier.offload(SOURCE, TENANT, BLOCKS, 100)
    order = world.tier.take_orders().begin[0]
    assert [(move.group, move.block) for move in order.moves] == [(0, 1), (0, 2), (0, 3), (1, 5), (1, 6)]
    assert world.tier.take_orders() is idle


def test_a_full_tier_says_no_and_does_nothing():
    world = World(slots=4)
    assert not world.tier.offload(SOURCE, TENANT, BLOCKS, 100)
    assert not world.tier.busy
    assert world.tier.take_orders() == Orders()
    assert world.tier.counters()["offloads_refused_budget"] == 1


def test_an_expired_copy_makes_room():
    world = World(slots=6)
    world.copied(expires_ns=10)
    assert not world.tier.offload(RequestId("second"), TENANT, BLOCKS, 100)
    world.now = 10
    assert world.tier.offload(RequestId("second"), TENANT, BLOCKS, 100)
    assert world.tier.counters()["evicted_pages"] == 5


@pytest.mark.parametrize("ended", [Ended.DONE, Ended.CANCELLED])
def test_a_copy_dropped_on_its_way_is_told_once_when_nobody_reads_the_blocks_any_more(ended: Ended):
    world = World(slots=5)
    world.tier.offload(SOURCE, TENANT, BLOCKS, 100)
    (order,) = world.tier.take_orders().begin
    world.tier.drop(SOURCE)
    world.tier.drop(SOURCE)
    assert world.tier.take_orders().cancel == (order.job,)
    assert world.offloaded == []
    assert not world.tier.offload(RequestId("next"), TENANT, BLOCKS, 100), "its slots are still being written"
    world.report(order.job, ended, digests=(0,) * 5)
    assert world.offloaded == [(SOURCE, None)]
    assert world.tier.offload(RequestId("next"), TENANT, BLOCKS, 100)


def test_a_copy_that_failed_leaves_nothing():
    world = World()
    world.tier.offload(SOURCE, TENANT, BLOCKS, 100)
    world.report(1, Ended.FAILED)
    assert world.offloaded == [(SOURCE, None)]
    assert world.tier.counters()["host_bytes"] == 0
    assert world.tier.counters()["offloads_failed"] == 1


def test_a_restore_moves_every_page_into_the_targets_own_blocks():
    world = World()
    certificate = world.copied()
    world.tier.expect(TARGET, TICKET, certificate)
    assert world.scheduled() == 12
    (order,) = world.tier.take_orders().begin
    assert (order.target, order.ticket) == (TARGET, TICKET)
    assert [(move.group, move.block, move.digest) for move in order.moves] == [
        *((0, 21, 0), (0, 22, 1), (0, 23, 2)),
        *((1, 26, 3), (1, 27, 4)),
    ]
    assert [move.slot for move in order.moves] == [page.slot for group in certificate.groups for page in group if page]
    assert world.report(order.job) == set()
    assert world.restored == [(TARGET, None)]


def test_pages_that_the_prefix_cache_has_are_not_restored():
    world = World()
    world.tier.expect(TARGET, TICKET, world.copied())
    assert world.scheduled(local_tokens=8) == 4
    (order,) = world.tier.take_orders().begin
    assert [(move.group, move.block) for move in order.moves] == [(0, 23), (1, 27)]


@pytest.mark.parametrize("local_tokens", [12, 16])
def test_a_prefix_cache_that_has_all_of_it_needs_no_transfer(local_tokens: int):
    world = World()
    world.tier.expect(TARGET, TICKET, world.copied())
    assert world.scheduled(local_tokens) == 0
    assert world.restored == [(TARGET, None)]
    assert not world.tier.busy
    assert not world.tier.expects(TARGET)


def test_asking_again_before_there_are_blocks_changes_nothing():
    world = World()
    world.tier.expect(TARGET, TICKET, world.copied())
    assert world.tier.matched_tokens(TARGET, 8) == 4
    assert world.scheduled(local_tokens=0) == 12


def test_a_request_that_nobody_expects_restores_nothing():
    world = World()
    assert world.scheduled() == 0
    assert world.restored == []


@pytest.mark.parametrize(
    ("ended", "refusal", "counter"),
    [
        (Ended.CORRUPT, Refusal.CORRUPT, "restores_corrupt"),
        (Ended.LATE, Refusal.TRANSFER, "restores_late"),
        (Ended.FAILED, Refusal.TRANSFER, "restores_failed"),
    ],
)
def test_a_restore_that_went_wrong_is_named_and_counted(ended: Ended, refusal: Refusal, counter: str):
    world = World()
    job = world.restoring()
    world.report(job, ended)
    assert world.restored == [(TARGET, refusal)]
    assert world.tier.counters()[counter] == 1
    assert world.tier.counters()["restored_pages"] == 0
    assert (world.tier.pages.get(SOURCE) is None) == (ended is Ended.CORRUPT), "only a corrupt copy is of no use"


def test_one_rank_that_failed_fails_the_restore():
    world = World(ranks=2)
    job = world.restoring()
    world.report(job, Ended.CORRUPT, rank=1)
    assert world.restored == []
    assert world.report(job, Ended.DONE, rank=0) == {TARGET}
    assert world.restored == [(TARGET, Refusal.CORRUPT)]


def test_a_withdrawn_restore_fails_even_when_its_bytes_arrived():
    world = World()
    job = world.restoring()
    world.tier.withdraw(TARGET)
    world.tier.withdraw(TARGET)
    assert world.tier.take_orders().cancel == (job,)
    assert world.report(job, Ended.DONE) == {TARGET}
    assert world.restored == [(TARGET, Refusal.TRANSFER)]


def test_a_restore_withdrawn_before_it_began_never_was():
    world = World()
    world.tier.expect(TARGET, TICKET, world.copied())
    world.tier.withdraw(TARGET)
    assert world.scheduled() == 0
    assert world.restored == []


def test_a_copy_that_has_gone_is_told_and_the_request_asked_again():
    world = World()
    world.tier.expect(TARGET, TICKET, world.copied())
    world.tier.drop(SOURCE)
    assert world.scheduled() is None
    assert world.restored == [(TARGET, Refusal.TRANSFER)]
    assert world.scheduled() == 0


def test_slots_that_went_to_somebody_else_are_no_copy():
    world = World(slots=5)
    stale = world.copied()
    world.tier.drop(SOURCE)
    other = world.copied(RequestId("other"))
    assert {p.slot for g in stale.groups for p in g if p} == {p.slot for g in other.groups for p in g if p}
    world.tier.expect(TARGET, TICKET, stale)
    assert world.scheduled() is None


def test_a_copy_dropped_under_a_restore_keeps_its_slots_until_that_has_ended():
    world = World(slots=5)
    job = world.restoring()
    world.tier.drop(SOURCE)
    assert not world.tier.offload(RequestId("next"), TENANT, BLOCKS, 100)
    assert world.report(job) == set()
    assert world.restored == [(TARGET, None)]
    assert world.tier.offload(RequestId("next"), TENANT, BLOCKS, 100)


def test_cancelling_all_leaves_no_copy_and_fails_what_is_in_flight():
    world = World(slots=15)
    job = world.restoring()
    world.copied(RequestId("idle"))
    world.tier.offload(RequestId("going"), TENANT, BLOCKS, 100)
    going = world.tier.take_orders().begin[0].job
    world.tier.cancel_all()
    assert set(world.tier.take_orders().cancel) == {job, going}
    assert world.report(job) == {TARGET}
    world.report(going, digests=(0,) * 5)
    assert world.restored == [(TARGET, Refusal.TRANSFER)]
    assert world.offloaded == [(RequestId("going"), None)]
    assert world.tier.counters()["host_bytes"] == 0


def test_a_page_that_the_certificate_lacks_is_a_defect():
    world = World()
    certificate = world.copied()
    full, _ = certificate.groups
    lacking = Certificate(
        TENANT, ScopeId("s"), TransitionId("x"), SOURCE, TARGET, TokenCount(12), "f", (full, (None,) * 3), Where.DRAM
    )
    world.tier.expect(TARGET, TICKET, lacking)
    with pytest.raises(InvariantViolation, match="invariant 4"):
        world.scheduled()


def test_an_allocation_without_the_restore_is_a_defect():
    world = World()
    world.tier.expect(TARGET, TICKET, world.copied())
    world.tier.matched_tokens(TARGET, 4)
    with pytest.raises(InvariantViolation, match="invariant 4"):
        world.tier.allocated(TARGET, [[], []], 0)


def test_rates_are_measured_and_restores_are_judged_by_restores():
    world = World()
    assert world.tier.restore_ns(8) is None
    job = world.restoring()
    assert world.tier.restore_bytes_per_s == 2e9  # of the offload: 1000 bytes in 500 ns
    output = SimpleNamespace(
        kv_connector_worker_meta=Reports((Result(job, 0, Ended.DONE, (), 1000, 1000),)), failed_recving=set()
    )
    world.tier.settle(output)
    assert world.tier.restore_bytes_per_s == 1e9
    assert world.tier.restore_ns(8) == (2 + 2) * SLOT  # the window is two blocks, whatever the length
    assert world.tier.restore_ns(80) == (20 + 2) * SLOT
    assert world.tier.bytes_of(BLOCKS) == 5 * SLOT
