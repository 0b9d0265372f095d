"""Which host memory belongs to whom: slots for KV pages that left the device.

Owns: the slots of a byte budget, the copy of a request's pages that each slot holds, the tenants' shares, and when a
slot may be written again.  Must not know: memory, threads, vLLM.
Strategy: every slot has room for the largest page of any group, so a slot fits whoever comes next and a copy is a count
of slots.  A copy that is given up while a transfer still reads or writes it keeps its slots until the last such
transfer has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from retire.core.errors import InvariantViolation
from retire.core.types import RequestId, TenantId

ALIGNMENT_BYTES = 4096


class NoRoom(Enum):
    """Why a copy was not taken in.  A copy that has not expired never makes room for a newcomer."""

    BUDGET = "budget"  # the tier is full
    TENANT = "tenant"  # the tenant's share is full


@dataclass(slots=True, eq=False)
class Copy:
    """The pages of one request in host memory.

    `slots[g][i]` holds the i-th page of group g, None where the source has none.  `users`: transfers that read or write
    the slots.  `complete`: every page has been written.
    """

    source: RequestId
    tenant: TenantId
    slots: tuple[tuple[int | None, ...], ...]
    expires_ns: int
    users: int = 0
    complete: bool = False


class HostPages:
    """One per scheduler.

    `page_bytes[g]`: bytes of one page of group g.  `limit_bytes(tenant)`: the tenant's share, None: everything.
    """

    def __init__(
        self,
        budget_bytes: int,
        page_bytes: Sequence[int],
        limit_bytes: Callable[[TenantId], int | None] = lambda _tenant: None,
    ) -> None:
        self.page_bytes = tuple(page_bytes)
        self.slot_bytes = slot_bytes(page_bytes)
        self._count = budget_bytes // self.slot_bytes
        self._limit_bytes = limit_bytes
        self._free: list[int] = []  # given back; the last one is the warmest
        self._fresh = 0  # slots from here on were never used
        self._copies: dict[RequestId, Copy] = {}
        self._leaving: set[Copy] = set()  # given up, and still in use
        self._held: defaultdict[TenantId, int] = defaultdict(int)
        self.evicted_pages = 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all slots that belong to somebody."""
        return self.slot_bytes * (self._fresh - len(self._free))

    def get(self, source: RequestId) -> Copy | None:
        """The copy of this request's pages, None when there is none (any more)."""
        return self._copies.get(source)

    def sources(self) -> list[RequestId]:
        """Every request that has a copy."""
        return list(self._copies)

    def reserve(
        self, source: RequestId, tenant: TenantId, groups: Sequence[Sequence[Any]], expires_ns: int, now_ns: int
    ) -> Copy | NoRoom:
        """Slots for every page of `groups` that is not None.  Expired copies make room first.

        Raises:
            InvariantViolation: the request has a copy already.
        """
        if source in self._copies:
            raise InvariantViolation(f"invariant 6: {source} is copied twice")
        wanted = sum(page is not None for group in groups for page in group)
        refusal = self._room(tenant, wanted)
        if refusal is not None:
            self._evict_expired(now_ns)
            refusal = self._room(tenant, wanted)
        if refusal is not None:
            return refusal
        slots = tuple(tuple(None if page is None else self._take() for page in group) for group in groups)
        self._held[tenant] += wanted
        copy = self._copies[source] = Copy(source, tenant, slots, expires_ns)
        return copy

    def _room(self, tenant: TenantId, wanted: int) -> NoRoom | None:
        limit = self._limit_bytes(tenant)
        if limit is not None and (self._held[tenant] + wanted) * self.slot_bytes > limit:
            return NoRoom.TENANT
        return NoRoom.BUDGET if wanted > self._count - self._fresh + len(self._free) else None

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._fresh += 1
        return self._fresh - 1

    def _evict_expired(self, now_ns: int) -> None:
        for copy in list(self._copies.values()):
            if copy.expires_ns <= now_ns and not copy.users:
                self.evicted_pages += len(_owned(copy))
                self.drop(copy.source)

    def drop(self, source: RequestId) -> None:
        """Nobody wants the copy any more.  No-op when there is none."""
        copy = self._copies.pop(source, None)
        if copy is None:
            return
        if copy.users:
            self._leaving.add(copy)
        else:
            self._give_back(copy)

    def hold(self, copy: Copy) -> None:
        """A transfer reads or writes the copy's slots: they go to nobody else before `release`."""
        copy.users += 1

    def release(self, copy: Copy) -> None:
        """That transfer has ended."""
        if copy.users == 0:
            raise InvariantViolation(f"invariant 5: nobody was using the copy of {copy.source}")
        copy.users -= 1
        if copy.users == 0 and copy in self._leaving:
            self._leaving.remove(copy)
            self._give_back(copy)

    def _give_back(self, copy: Copy) -> None:
        slots = _owned(copy)
        self._free += slots
        self._held[copy.tenant] -= len(slots)
        if not self._held[copy.tenant]:
            del self._held[copy.tenant]


def slot_bytes(page_bytes: Sequence[int]) -> int:
    """Bytes of one slot: the largest page, in whole pages of the machine."""
    return -(-max(page_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _owned(copy: Copy) -> list[int]:
    return [slot for group in copy.slots for slot in group if slot is not None]
