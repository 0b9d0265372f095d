"""Worker side of the DRAM tier: one thread that moves pages.

Owns: the order of transfers, the digests, and the ticket of a restore's target.  Must not know: the scheduler, why a
page moves.
Strategy: the thread takes a page at a time, of a restore if there is one, and looks before every page and after the
last whether the transfer is still wanted.  An end is told once; what nobody wants any more is never told as done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from retire.core.types import RequestId, Ticket
from retire.engine.tier_memory import HostArena, Mover, Piece, mover_of, pieces_of, pinned
from retire.engine.tier_wire import Ended, Move, Order, Orders, Result, of_rank
from retire.kv.host import slot_bytes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Task:
    """A transfer on its way.  `after`: what the mover has to wait for."""

    order: Order
    after: Any
    pages: int = 0
    moved_bytes: int = 0
    busy_ns: int = 0
    cancelled: bool = False
    ended: Ended | None = None
    digests: list[int] = field(default_factory=list)


class TierWorker:
    """One per worker process.

    `caches`: each layer's KV cache by name, as vLLM registers it.  `holds(ticket)`: whether its owner still has
    authority.  `verify`: whether pages are hashed on their way out and compared on their way in.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        kv_cache_config: Any,
        holds: Callable[[Ticket], bool],
        rank: int,
        *,
        verify: bool,
        mover: Mover | None = None,
    ) -> None:
        device = next(iter(caches.values())).device
        self._caches = dict(caches)  # their addresses are used below
        self._groups: tuple[tuple[Piece, ...], ...] = tuple(
            pieces_of((caches[name] for name in group.layer_names), kv_cache_config.num_blocks)
            for group in kv_cache_config.kv_cache_groups
        )
        self._page_bytes = tuple(sum(piece.size for piece in pieces) for pieces in self._groups)
        self.arena = HostArena(slot_bytes(self._page_bytes), pinned(device))
        self._mover = mover or mover_of(device)
        self._holds = holds
        self._rank = rank
        self._verify = verify
        self._tasks: dict[int, _Task] = {}  # not told yet
        self._restores: deque[_Task] = deque()
        self._offloads: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="retire-tier", daemon=True)
        self._thread.start()

    # -- the step's thread ------------------------------------------------------------------------------------------

    def take(self, orders: Orders) -> None:
        """Begin and cancel what a step says."""
        if not orders.begin and not orders.cancel:
            return
        after = self._mover.mark()
        with self._changed:
            for order in orders.begin:
                task = self._tasks[order.job] = _Task(order, after)
                (self._offloads if order.target is None else self._restores).append(task)
            for job in orders.cancel:
                if job in self._tasks:
                    self._tasks[job].cancelled = True
            self._changed.notify()

    def collect(self) -> list[tuple[RequestId | None, Result]]:
        """Every transfer that ended since the last call, with its target."""
        if not self._tasks:
            return []
        with self._changed:
            ended = [task for task in self._tasks.values() if task.ended is not None]
            for task in ended:
                del self._tasks[task.order.job]
        return [(task.order.target, self._result(task)) for task in ended]

    def _result(self, task: _Task) -> Result:
        assert task.ended is not None
        ended = Ended.CANCELLED if task.cancelled and task.ended is Ended.DONE else task.ended
        return Result(task.order.job, self._rank, ended, tuple(task.digests), task.moved_bytes, task.busy_ns)

    def close(self) -> None:
        """Stop the thread; what is in flight stays unfinished."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # -- the transfer thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._mover.enter()
        while (task := self._due()) is not None:
            begun_ns = time.monotonic_ns()
            try:
                ended = self._advance(task)
            except Exception:
                logger.exception("transfer %d failed", task.order.job)
                ended = Ended.FAILED
            task.busy_ns += time.monotonic_ns() - begun_ns
            if ended is not None:
                with self._changed:
                    task.ended = ended
                    (self._offloads if task.order.target is None else self._restores).remove(task)

    def _due(self) -> _Task | None:
        with self._changed:
            while not self._closed and not self._restores and not self._offloads:
                self._changed.wait()
            if self._closed:
                return None
            return self._restores[0] if self._restores else self._offloads[0]

    def _advance(self, task: _Task) -> Ended | None:
        """Move the next page; how the transfer has ended, if it has."""
        order = task.order
        if task.cancelled:
            return Ended.CANCELLED
        if order.ticket is not None and not self._holds(order.ticket):
            return Ended.LATE
        if task.pages == len(order.moves):
            return Ended.DONE
        move = order.moves[task.pages]
        view, address = self.arena.slot(move.slot)
        page = view[: self._page_bytes[move.group]]
        if order.target is None:
            self._mover.move(self._copies(move, address, out=True), task.after)
            task.digests.append(xxhash.xxh3_128_intdigest(page) if self._verify else 0)
        else:
            if self._verify and xxhash.xxh3_128_intdigest(page) != of_rank(move.digest, self._rank):
                return Ended.CORRUPT
            self._mover.move(self._copies(move, address, out=False), task.after)
        task.pages += 1
        task.moved_bytes += len(page)
        return None

    def _copies(self, move: Move, host: int, *, out: bool) -> list[tuple[int, int, int]]:
        copies = []
        for piece in self._groups[move.group]:
            device = piece.address + move.block * piece.stride
            copies.append((host, device, piece.size) if out else (device, host, piece.size))
            host += piece.size
        return copies
