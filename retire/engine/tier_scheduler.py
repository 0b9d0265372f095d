"""The DRAM tier as the coordinator sees it: what is copied out, what comes back, and when that is known.

Owns: transfers from the moment they are wanted to their last receipt.  Must not know: transitions, threads, memory.
Strategy: a transfer is a job that every rank ends exactly once.  Dropping and withdrawing only change what the end
means, so whoever holds device blocks or slots for a job learns of its end once, and not before the last rank stopped
touching them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from retire.core.errors import InvariantViolation
from retire.core.types import BlockRef, Certificate, HostRef, KVGroup, Refusal, RequestId, TenantId, Ticket
from retire.engine.tier_wire import Ended, Move, Order, Orders, Result, joined
from retire.kv.host import Copy, HostPages, NoRoom

HostGroups = tuple[tuple[HostRef | None, ...], ...]
_NOTHING = Orders()
_NEWEST_WEIGHT = 0.3  # of the last transfer in the running rate


@dataclass(slots=True)
class _Expected:
    """A waiting request that restores.  `local_tokens`: what the device's prefix cache gave it when last asked."""

    ticket: Ticket
    certificate: Certificate
    local_tokens: int = 0


@dataclass(slots=True)
class _Job:
    """`target`: the request a restore is for, None for an offload.  `results`: by rank."""

    copy: Copy
    target: RequestId | None
    order: Order
    withdrawn: bool = False
    results: dict[int, Result] = field(default_factory=dict)


class Tier:
    """One per scheduler; all calls come from the engine's own thread.  `ranks`: workers that end each job.

    `offloaded(source, groups)`: the copy is complete; None: there is none, and nobody reads the device pages any more.
    Called exactly once for every `offload` that returned True.
    `restored(target, refusal)`: None: every page of the certificate is on the device, verified; otherwise the request
    is computed from its start.  Called once for every `expect` that was not withdrawn before its transfer began, before
    upstream acts on the transfer; the target may have ended by then.
    """

    def __init__(
        self, pages: HostPages, groups: Sequence[KVGroup], ranks: int, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.offloaded: Callable[[RequestId, HostGroups | None], None] = lambda _source, _groups: None
        self.restored: Callable[[RequestId, Refusal | None], None] = lambda _target, _refusal: None
        self.pages = pages
        self._groups = tuple(groups)
        self._ranks = ranks
        self._clock_ns = clock_ns
        self._jobs: dict[int, _Job] = {}
        self._last_job = 0
        self._expected: dict[RequestId, _Expected] = {}
        self._begin: list[Order] = []
        self._cancel: list[int] = []
        self._counts: Counter[str] = Counter()
        self._restore_rate: float | None = None
        self._offload_rate: float | None = None

    # -- what the coordinator asks ----------------------------------------------------------------------------------

    def offload(
        self, source: RequestId, tenant: TenantId, groups: Sequence[Sequence[BlockRef | None]], expires_ns: int
    ) -> bool:
        """Copy these device pages to host memory; they stay as they are until `offloaded` was called.

        False: there is no room, and nothing happens.
        """
        copy = self.pages.reserve(source, tenant, groups, expires_ns, self._clock_ns())
        if isinstance(copy, NoRoom):
            self._counts[f"offloads_refused_{copy.value}"] += 1
            return False
        moves = tuple(
            Move(group, ref.block, slot)
            for group, (refs, slots) in enumerate(zip(groups, copy.slots, strict=True))
            for ref, slot in zip(refs, slots, strict=True)
            if ref is not None and slot is not None
        )
        self._start(copy, moves, None, None)
        return True

    def drop(self, source: RequestId) -> None:
        """The copy is no longer wanted.  A transfer that still writes it ends with `offloaded(source, None)`; one that
        reads it may end well.
        """
        for number, job in self._jobs.items():
            if job.target is None and job.copy.source == source:
                self._withdraw(number, job)
        self.pages.drop(source)

    def prolong(self, source: RequestId, expires_ns: int) -> None:
        """Nobody takes the copy's slots before then."""
        copy = self.pages.get(source)
        if copy is not None:
            copy.expires_ns = max(copy.expires_ns, expires_ns)

    def expect(self, target: RequestId, ticket: Ticket, certificate: Certificate) -> None:
        """Let a waiting request restore the certificate's pages when the scheduler comes to it."""
        self._expected[target] = _Expected(ticket, certificate)

    def withdraw(self, target: RequestId) -> None:
        """Do not restore after all: a transfer in flight ends with a refusal.  No-op for an unknown request."""
        self._expected.pop(target, None)
        for number, job in self._jobs.items():
            if job.target == target:
                self._withdraw(number, job)

    def cancel_all(self) -> None:
        """Weights or the cache change: no copy is of any use, and nothing in flight may become readable."""
        for number, job in self._jobs.items():
            self._withdraw(number, job)
        for source in self.pages.sources():
            self.pages.drop(source)

    @property
    def restore_bytes_per_s(self) -> float | None:
        """What restores were measured to move, offloads until there was one, None until there was either."""
        return self._offload_rate if self._restore_rate is None else self._restore_rate

    def restore_ns(self, tokens: int) -> float | None:
        """How long a prefix of so many tokens takes to come back, None while nobody knows."""
        rate = self.restore_bytes_per_s
        if rate is None:
            return None
        pages = (-(-min(tokens, group.window_tokens or tokens) // group.block_tokens) for group in self._groups)
        return sum(map(mul, pages, self.pages.page_bytes)) * 1e9 / rate

    def bytes_of(self, groups: Sequence[Sequence[Any]]) -> int:
        """Bytes that a transfer of these pages moves on each rank."""
        return sum(
            size * sum(page is not None for page in pages)
            for size, pages in zip(self.pages.page_bytes, groups, strict=True)
        )

    def counters(self) -> dict[str, int]:
        """What happened so far, and what is held now."""
        return {
            "offloaded_pages": 0,
            "restored_pages": 0,
            "restores_corrupt": 0,
            "restores_late": 0,
            "restores_failed": 0,
            "offloads_failed": 0,
            "offloads_refused_budget": 0,
            "offloads_refused_tenant": 0,
            **self._counts,
            "evicted_pages": self.pages.evicted_pages,
            "host_bytes": self.pages.bytes_in_use,
            "transfers": len(self._jobs),
        }

    # -- what vLLM's scheduler asks, through the connector ----------------------------------------------------------

    def expects(self, request_id: RequestId) -> bool:
        """Whether the request has pages to restore."""
        return request_id in self._expected

    def matched_tokens(self, request_id: RequestId, local_tokens: int) -> int | None:
        """Tokens that a restore adds to the `local_tokens` found in the device's prefix cache.

        None: the copy has gone and `restored` was told so; ask again, the request may have got another certificate.
        """
        expected = self._expected.get(request_id)
        if expected is None:
            return 0
        expected.local_tokens = local_tokens
        missing = expected.certificate.tokens - local_tokens
        if missing <= 0:
            return 0
        if self._copy_of(expected.certificate) is None:
            del self._expected[request_id]
            self.restored(request_id, Refusal.TRANSFER)
            return None
        return missing

    def allocated(self, request_id: RequestId, blocks: Sequence[Sequence[Any]], restored_tokens: int) -> None:
        """The request has its blocks, the last `restored_tokens` of its prefix are to be restored into them."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        certificate = expected.certificate
        if restored_tokens == 0:
            if expected.local_tokens < certificate.tokens:
                raise InvariantViolation(f"invariant 4: nothing is restored into {request_id}")
            self.restored(request_id, None)  # the prefix cache had all of it
            return
        copy = self._copy_of(certificate)
        assert copy is not None, "no copy went away between the question and the allocation"
        moves = []
        for group, (pages, table) in enumerate(zip(certificate.groups, blocks, strict=True)):
            first = expected.local_tokens // self._groups[group].block_tokens
            for page, block in zip(pages[first:], table[first:], strict=False):
                if block.is_null:
                    continue
                if not isinstance(page, HostRef):
                    raise InvariantViolation(f"invariant 4: {request_id} needs a page that its certificate lacks")
                moves.append(Move(group, block.block_id, page.slot, page.digest))
        self._start(copy, tuple(moves), request_id, expected.ticket)

    def take_orders(self) -> Orders:
        """What the workers have to be told with this step."""
        if not self._begin and not self._cancel:
            return _NOTHING
        orders = Orders(tuple(self._begin), tuple(self._cancel))
        self._begin, self._cancel = [], []
        return orders

    @property
    def busy(self) -> bool:
        """Whether some transfer has not ended: the engine has to keep stepping."""
        return bool(self._jobs)

    def settle(self, output: Any) -> None:
        """Take the workers' reports out of a KVConnectorOutput; add to its failures what may not be used.

        Has to run before upstream reads `failed_recving`.
        """
        reports = output.kv_connector_worker_meta if output is not None else None
        if reports is None:
            return
        output.kv_connector_worker_meta = None
        for result in reports.results:
            job = self._jobs[result.job]
            job.results[result.rank] = result
            if len(job.results) == self._ranks:
                del self._jobs[result.job]
                self._end(job, output)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _copy_of(self, certificate: Certificate) -> Copy | None:
        """The complete copy that the certificate speaks of."""
        copy = self.pages.get(certificate.source)
        if copy is None or not copy.complete or copy.tenant != certificate.tenant:
            return None
        for pages, slots in zip(certificate.groups, copy.slots, strict=True):
            if any(isinstance(p, HostRef) and p.slot != slot for p, slot in zip(pages, slots, strict=False)):
                return None
        return copy

    def _start(self, copy: Copy, moves: tuple[Move, ...], target: RequestId | None, ticket: Ticket | None) -> None:
        self._last_job += 1
        order = Order(self._last_job, moves, target, ticket)
        self.pages.hold(copy)
        self._jobs[order.job] = _Job(copy, target, order)
        self._begin.append(order)

    def _withdraw(self, number: int, job: _Job) -> None:
        if not job.withdrawn:
            job.withdrawn = True
            self._cancel.append(number)

    def _end(self, job: _Job, output: Any) -> None:
        self.pages.release(job.copy)
        ends = {result.ended for result in job.results.values()}
        done = ends == {Ended.DONE}
        if done:
            self._measure(job)
        if job.target is None:
            self._offload_ended(job, done=done)
        else:
            self._restore_ended(job, job.target, ends, output)

    def _offload_ended(self, job: _Job, *, done: bool) -> None:
        copy = job.copy
        if done and not job.withdrawn:
            copy.complete = True
            self._counts["offloaded_pages"] += len(job.order.moves)
            self.offloaded(copy.source, _host_groups(copy, job))
            return
        if not job.withdrawn:
            self._counts["offloads_failed"] += 1
            self.pages.drop(copy.source)
        self.offloaded(copy.source, None)

    def _restore_ended(self, job: _Job, target: RequestId, ends: set[Ended], output: Any) -> None:
        if Ended.CORRUPT in ends:
            refusal: Refusal | None = Refusal.CORRUPT
            self._counts["restores_corrupt"] += 1
            self.pages.drop(job.copy.source)
        elif job.withdrawn or Ended.LATE in ends:
            refusal = Refusal.TRANSFER
            self._counts["restores_late"] += 1
        elif ends != {Ended.DONE}:
            refusal = Refusal.TRANSFER
            self._counts["restores_failed"] += 1
        else:
            refusal = None
            self._counts["restored_pages"] += len(job.order.moves)
        if refusal is not None:
            output.failed_recving = {*output.failed_recving, target}
        self.restored(target, refusal)

    def _measure(self, job: _Job) -> None:
        slowest = max(job.results.values(), key=lambda result: result.busy_ns)
        if not slowest.moved_bytes or not slowest.busy_ns:
            return
        rate = slowest.moved_bytes * 1e9 / slowest.busy_ns
        if job.target is None:
            self._offload_rate = _mixed(self._offload_rate, rate)
        else:
            self._restore_rate = _mixed(self._restore_rate, rate)


def _mixed(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_WEIGHT * (newest - before)


def _host_groups(copy: Copy, job: _Job) -> HostGroups:
    """The copy's pages with the digests of all ranks."""
    by_rank = [job.results[rank].digests for rank in sorted(job.results)]
    digests = map(joined, zip(*by_rank, strict=True))
    return tuple(
        tuple(None if slot is None else HostRef(slot, next(digests)) for slot in slots) for slots in copy.slots
    )
