"""Worker side of the DRAM tier, on plain tensors laid out as vLLM lays out its caches."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from retire.core.types import RequestId, Ticket
from retire.engine.tier_memory import CpuMover, CudaMover, HostArena, Piece, pieces_of
from retire.engine.tier_wire import Ended, Move, Order, Orders, Reports, Result, joined, of_rank
from retire.engine.tier_worker import TierWorker

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 8, 2, 4, 6
TARGET, TICKET = RequestId("target"), Ticket(0, 1, 0, 1)
GROUPS = (("a0", "a1", "a2"), ("b0", "b1"))  # the second overlays the first


def laid_out(layout: KVCacheLayout, *, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Each layer's cache, logically [B, H, N, C]: all groups in one allocation, as `allocate_kv_cache` does it."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    raw = torch.randint(0, 2**15, tuple(shape[axis] for axis in layout.stride_order), dtype=torch.int16, device=device)
    logical = raw.permute(tuple(layout.stride_order.index(axis) for axis in range(5)))
    return {name: logical[layer] for names in GROUPS for layer, name in enumerate(names)}


def config(groups: Iterable[Iterable[str]] = GROUPS, num_blocks: int = BLOCKS) -> SimpleNamespace:
    made = [SimpleNamespace(layer_names=list(names)) for names in groups]
    return SimpleNamespace(kv_cache_groups=made, num_blocks=num_blocks)


class Worker:
    """A worker and the answers it has given.  `holds` is what the authority table would say."""

    def __init__(self, caches: dict[str, torch.Tensor], **options: object) -> None:
        self.held = True
        self.caches = caches
        self._settings = {"rank": 0, "verify": True, "holds": lambda _ticket: self.held, **options}
        self.tier = TierWorker(caches, config(), **self._settings)  # type: ignore[arg-type]
        self._jobs = 0

    def offload(self, *moves: Move) -> Order:
        return self._order(moves)

    def restore(self, *moves: Move) -> Order:
        return self._order(moves, target=TARGET, ticket=TICKET)

    def _order(self, moves: tuple[Move, ...], **of: object) -> Order:
        self._jobs += 1
        return Order(self._jobs, moves, **of)  # type: ignore[arg-type]

    def ends(self, *orders: Order, cancel: tuple[int, ...] = ()) -> list[Result]:
        """Give the orders with one step and wait for the end of each."""
        self.tier.take(Orders(orders, cancel))
        return self.wait(len(orders))

    def wait(self, count: int) -> list[Result]:
        results: dict[int, Result] = {}
        deadline = time.monotonic() + 30
        while len(results) < count:
            assert time.monotonic() < deadline
            results |= {result.job: result for _, result in self.tier.collect()}
            time.sleep(0.001)
        return [results[job] for job in sorted(results)]

    def block(self, group: int, block: int) -> list[torch.Tensor]:
        return [self.caches[name][block].clone() for name in GROUPS[group]]


@pytest.fixture
def started() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(layout: KVCacheLayout = KVCacheLayout.LBNHC, **options: object) -> Worker:
        workers.append(Worker(laid_out(layout), **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.tier.close()
        assert not worker.tier._thread.is_alive()


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_pages_of_every_group_come_back_bit_for_bit_in_other_blocks(started, layout: KVCacheLayout) -> None:
    worker = started(layout)
    out = worker.offload(Move(0, 1, 0), Move(0, 2, 1), Move(1, 5, 2))
    before = [worker.block(0, block) for block in range(BLOCKS)]
    smaller = worker.block(1, 5)
    (left,) = worker.ends(out)
    assert left.ended is Ended.DONE
    assert left.moved_bytes == 8 * LAYERS * HEADS * TOKENS * CONTENT * 2 // LAYERS
    back = zip(out.moves, (3, 4, 6), left.digests, strict=True)
    (came,) = worker.ends(worker.restore(*(Move(m.group, block, m.slot, digest) for m, block, digest in back)))
    assert came.ended is Ended.DONE
    assert equal(worker.block(0, 3), before[1])
    assert equal(worker.block(0, 4), before[2])
    assert equal(worker.block(1, 6), smaller)
    assert equal([worker.caches["a2"][6]], [before[6][2]]), "the layer that the smaller group does not have"
    for untouched in (0, 1, 2, 5, 7):
        assert equal(worker.block(0, untouched), before[untouched])


def test_the_pieces_of_a_block_are_as_few_as_the_layout_lets_them_be() -> None:
    layer = HEADS * TOKENS * CONTENT * 2
    pieces = {}
    for layout in KVCacheLayout:
        caches = laid_out(layout)
        pieces[layout] = pieces_of((caches[name] for name in GROUPS[0]), BLOCKS)
    assert [piece.size for piece in pieces[KVCacheLayout.LBNHC]] == [layer] * LAYERS
    assert [piece.size for piece in pieces[KVCacheLayout.BLNHC]] == [layer * LAYERS]
    assert [piece.size for piece in pieces[KVCacheLayout.LHBNC]] == [layer // HEADS] * LAYERS * HEADS
    assert [piece.size for piece in pieces[KVCacheLayout.BHLNC]] == [layer * LAYERS]


def test_kernel_blocks_and_layers_that_share_a_cache_are_one_page_of_their_block() -> None:
    cache = torch.zeros(BLOCKS * 4, HEADS, 2, CONTENT, dtype=torch.int16)
    (piece,) = pieces_of([cache, cache], BLOCKS)
    assert piece == Piece(cache.data_ptr(), 4 * HEADS * 2 * CONTENT * 2, 4 * HEADS * 2 * CONTENT * 2)


def test_a_flipped_byte_is_refused_and_the_block_behind_it_not_written(started) -> None:
    worker = started()
    (left,) = worker.ends(worker.offload(Move(0, 1, 0), Move(0, 2, 1)))
    page, _ = worker.tier.arena.slot(1)
    page[17] ^= 1
    before = worker.block(0, 4)
    restore = worker.restore(Move(0, 3, 0, left.digests[0]), Move(0, 4, 1, left.digests[1]))
    assert worker.ends(restore)[0].ended is Ended.CORRUPT
    assert equal(worker.block(0, 4), before)


def test_without_digests_nothing_is_compared(started) -> None:
    worker = started(verify=False)
    (left,) = worker.ends(worker.offload(Move(0, 1, 0)))
    assert left.digests == (0,)
    worker.tier.arena.slot(0)[0][17] ^= 1
    assert worker.ends(worker.restore(Move(0, 3, 0)))[0].ended is Ended.DONE


def test_a_restore_whose_target_has_lost_its_ticket_does_not_begin(started) -> None:
    worker = started()
    (left,) = worker.ends(worker.offload(Move(0, 1, 0)))
    before = worker.block(0, 3)
    worker.held = False
    assert worker.ends(worker.restore(Move(0, 3, 0, left.digests[0])))[0].ended is Ended.LATE
    assert equal(worker.block(0, 3), before)


class Slow(CpuMover):
    """Each page waits to be let through; `moved` are the pages so far."""

    def __init__(self) -> None:
        self.moved = 0
        self.reached = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.broken = False

    def move(self, copies, after) -> None:
        self.reached.release()
        assert self.let.acquire(timeout=30)
        if self.broken:
            raise OSError("broken on purpose")
        super().move(copies, after)
        self.moved += 1


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def slow_worker(started, slow: Slow) -> Iterator[Worker]:
    yield started(mover=slow)
    slow.let.release(1000)


@pytest.mark.parametrize("pages_before", [1, 2])
def test_a_ticket_lost_between_pages_or_after_the_last_one_ends_the_restore(
    slow: Slow, slow_worker: Worker, pages_before: int
) -> None:
    slow.let.release(2)
    (left,) = slow_worker.ends(slow_worker.offload(Move(0, 1, 0), Move(0, 2, 1)))
    restore = slow_worker.restore(Move(0, 3, 0, left.digests[0]), Move(0, 4, 1, left.digests[1]))
    slow_worker.tier.take(Orders((restore,)))
    for page in range(pages_before):
        for _ in range(2 if page == 0 else 0):
            slow.reached.acquire(timeout=30)  # those of the offload
        assert slow.reached.acquire(timeout=30)
        if page == pages_before - 1:
            slow_worker.held = False
        slow.let.release()
    assert slow_worker.wait(1)[0].ended is Ended.LATE
    assert slow.moved == 2 + pages_before


def test_a_cancelled_transfer_stops_at_the_next_page(slow: Slow, slow_worker: Worker) -> None:
    offload = slow_worker.offload(Move(0, 1, 0), Move(0, 2, 1))
    slow_worker.tier.take(Orders((offload,)))
    assert slow.reached.acquire(timeout=30)
    slow_worker.tier.take(Orders(cancel=(offload.job,)))
    slow.let.release()
    assert slow_worker.wait(1)[0].ended is Ended.CANCELLED
    assert slow.moved == 1


def test_what_is_cancelled_after_its_end_but_before_it_was_told_is_told_as_cancelled(started) -> None:
    worker = started()
    offload = worker.offload(Move(0, 1, 0))
    worker.tier.take(Orders((offload,)))
    while worker.tier._tasks[offload.job].ended is None:
        time.sleep(0.001)
    assert worker.ends(cancel=(offload.job,)) == []
    assert worker.wait(1)[0].ended is Ended.CANCELLED
    worker.tier.take(Orders(cancel=(offload.job,)))  # too late: nobody knows it any more


def test_an_error_in_a_transfer_is_told_and_the_next_one_runs(slow: Slow, slow_worker: Worker) -> None:
    slow.broken = True
    slow.let.release()
    assert slow_worker.ends(slow_worker.offload(Move(0, 1, 0)))[0].ended is Ended.FAILED
    slow.broken = False
    slow.let.release()
    assert slow_worker.ends(slow_worker.offload(Move(0, 1, 0)))[0].ended is Ended.DONE


def test_a_restore_overtakes_an_offload_between_two_pages(slow: Slow, slow_worker: Worker) -> None:
    slow.let.release()
    (left,) = slow_worker.ends(slow_worker.offload(Move(0, 1, 0)))
    assert slow.reached.acquire(timeout=30)
    slow_worker.tier.take(Orders((slow_worker.offload(*(Move(0, 2, slot) for slot in range(1, 5))),)))
    assert slow.reached.acquire(timeout=30)
    slow_worker.tier.take(Orders((slow_worker.restore(Move(0, 3, 0, left.digests[0])),)))
    slow.let.release(2)
    assert slow_worker.wait(1)[0].ended is Ended.DONE
    assert slow.moved == 3


def test_every_rank_compares_its_own_digest(started) -> None:
    worker = started(rank=1)
    (left,) = worker.ends(worker.offload(Move(0, 1, 0)))
    both = joined((12345, left.digests[0]))
    assert [of_rank(both, rank) for rank in (0, 1)] == [12345, left.digests[0]]
    assert worker.ends(worker.restore(Move(0, 3, 0, both)))[0].ended is Ended.DONE
    assert worker.ends(worker.restore(Move(0, 3, 0, left.digests[0])))[0].ended is Ended.CORRUPT


def test_slots_lie_apart_and_stay_where_they_are() -> None:
    pinned: list[tuple[int, int]] = []
    arena = HostArena(20 << 20, lambda address, size: pinned.append((address, size)))
    (first, where), (second, elsewhere) = arena.slot(0), arena.slot(3)
    first[0], second[0] = 1, 2
    assert arena.slot(0)[1] == where
    assert arena.slot(0)[0][0] == 1
    assert abs(elsewhere - where) >= 20 << 20
    assert where % 4096 == elsewhere % 4096 == 0
    assert len(pinned) == 2


def test_what_travels_between_processes_survives_pickling() -> None:
    orders = Orders((Order(1, (Move(0, 1, 2, 2**127),), TARGET, TICKET),), (7,))
    assert pickle.loads(pickle.dumps(orders)) == orders
    one, two = (Reports((Result(1, rank, Ended.DONE, (5,), 6, 7),)) for rank in (0, 1))
    assert pickle.loads(pickle.dumps(one.aggregate(two))).results == one.results + two.results


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_pages_of_a_cuda_device_come_back_bit_for_bit(layout: KVCacheLayout) -> None:
    worker = Worker(laid_out(layout, device="cuda"))
    assert isinstance(worker.tier._mover, CudaMover)
    try:
        before = worker.block(0, 1)
        (left,) = worker.ends(worker.offload(Move(0, 1, 0)))
        (came,) = worker.ends(worker.restore(Move(0, 3, 0, left.digests[0])))
        assert came.ended is Ended.DONE
        assert equal(worker.block(0, 3), before)
    finally:
        worker.tier.close()
