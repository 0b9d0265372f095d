"""Who owns a KV block: generations, pins and quotas over vLLM's block pool.

Owns: the count of allocations per block, and the references that keep certified blocks alive until adoption.
Must not know: scopes, epochs, requests' fates.
Strategy: a guaranteed pin is one reference of the pool, within the tenant's quota; what lies beyond it is a block id
and a generation, readable until somebody is given the block (the pool frees published blocks to its queue's end).
A copy to host memory holds references of its own, so that nobody overwrites what is being read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from retire.core.errors import InvariantViolation
from retire.core.types import BlockId, BlockRef, Generation, Holding, KVGroup, PageRef, RequestId, TenantId


@dataclass(frozen=True, slots=True)
class Quota:
    """`blocks`: how many distinct blocks a tenant's pins may guarantee.  `beyond`: whether more is kept, readable until
    it is reused; else nothing of a holding that does not fit is kept.
    """

    blocks: int
    beyond: bool = True


@dataclass(slots=True)
class _Pin:
    tenant: TenantId
    blocks: list[Any]


class Ownership:
    """`pool`: vLLM's BlockPool (or anything with `blocks`, `null_block`, `touch` and `free_blocks`).

    `quota`: of a tenant.  `limit`: blocks that all guaranteed pins together may keep from ordinary work.
    """

    def __init__(self, pool: Any, quota: Callable[[TenantId], Quota], limit: int) -> None:
        self._pool = pool
        self._quota = quota
        self._limit = limit
        self._generation = [0] * len(pool.blocks)
        self._pins: dict[RequestId, _Pin] = {}
        self._copies: dict[RequestId, list[Any]] = {}
        self._accounts: dict[TenantId, Counter[int]] = {}  # guaranteed block -> how many pins of the tenant keep it
        self._guaranteed: Counter[int] = Counter()  # the same over all tenants

    def allocated(self, blocks: Iterable[Any]) -> None:
        """The pool handed these blocks to a new owner."""
        for block in blocks:
            self._generation[block.block_id] += 1

    def generation(self, block: BlockId) -> Generation:
        """How often the block has been handed out."""
        return Generation(self._generation[block])

    def ref(self, block: Any) -> BlockRef | None:
        """A reference to a block as it is owned now, None for the null block."""
        return None if block.is_null else BlockRef(BlockId(block.block_id), self.generation(BlockId(block.block_id)))

    def holds(self, page: PageRef) -> bool:
        """Whether a page is still what it was when it was referred to."""
        return not isinstance(page, BlockRef) or self._generation[page.block] == page.generation

    # -- pins -------------------------------------------------------------------------------------------------------

    def pin(self, holding: Holding, part: Holding, groups: Sequence[KVGroup]) -> Holding | None:
        """Keep `part` of the holding by guaranteed pins, head first, as far as the quota goes; the rest while it lasts.

        Returns the holding with `guaranteed` set, or None when the tenant may keep nothing like it: nothing is pinned.
        """
        if holding.request in self._pins:
            raise InvariantViolation(f"invariant 6: {holding.request} is pinned twice")
        quota = self._quota(holding.tenant)
        account = self._accounts.get(holding.tenant, Counter())
        alive = [ref for ref in _by_position(part.groups, groups) if self.holds(ref)]
        room, common_room = quota.blocks - len(account), self._limit - len(self._guaranteed)
        kept: list[Any] = []
        for ref in alive:
            room -= ref.block not in account
            common_room -= ref.block not in self._guaranteed
            if room < 0 or common_room < 0:
                break
            kept.append(self._pool.blocks[ref.block])
        guaranteed = len(kept) == len(alive)
        if quota.blocks == 0 or not (guaranteed or quota.beyond):
            return None
        self._pool.touch(kept)
        self._accounts[holding.tenant] = account
        for count in (account, self._guaranteed):
            count.update(block.block_id for block in kept)
        self._pins[holding.request] = _Pin(holding.tenant, kept)
        return replace(holding, guaranteed=guaranteed)

    def keep_only(self, request: RequestId, pages: Iterable[Iterable[PageRef]]) -> None:
        """Give back what the pins of `request` keep beyond these blocks: nobody will adopt it."""
        kept = {page.block for group in pages for page in group if isinstance(page, BlockRef)}
        pin = self._pins[request]
        surplus = [block for block in pin.blocks if block.block_id not in kept]
        pin.blocks = [block for block in pin.blocks if block.block_id in kept]
        self._give_back(pin.tenant, surplus)

    def release(self, request: RequestId) -> None:
        """Give every reference of these pins back."""
        pin = self._pins.pop(request, None)
        if pin is None:
            raise InvariantViolation(f"invariant 6: {request} is not pinned")
        self._give_back(pin.tenant, pin.blocks)

    def _give_back(self, tenant: TenantId, blocks: list[Any]) -> None:
        """The sequence's tail first, so that it is evicted first."""
        for count in (self._accounts[tenant], self._guaranteed):
            for block in blocks:
                count[block.block_id] -= 1
                if not count[block.block_id]:
                    del count[block.block_id]
        self._pool.free_blocks(reversed(blocks))

    # -- copies to host memory --------------------------------------------------------------------------------------

    def begin_copy(self, holding: Holding) -> tuple[tuple[BlockRef | None, ...], ...]:
        """Hold every block that is still the holding's while it is read; the others are None in what is returned."""
        alive = tuple(tuple(ref if self.holds(ref) else None for ref in group) for group in holding.groups)
        blocks = [self._pool.blocks[ref.block] for group in alive for ref in group if ref is not None]
        self._pool.touch(blocks)
        self._copies[holding.request] = blocks
        return alive

    def end_copy(self, request: RequestId) -> None:
        """The copy is over, or not wanted any more; saying so again changes nothing."""
        self._pool.free_blocks(reversed(self._copies.pop(request, [])))

    def end_copies(self) -> None:
        """No copy is wanted any more: what is still being read may be overwritten."""
        for request in list(self._copies):
            self.end_copy(request)

    # -- what is held -----------------------------------------------------------------------------------------------

    def pinned_blocks(self, tenant: TenantId | None = None) -> int:
        """Distinct blocks that some pin or copy keeps alive; or some pin of the tenant."""
        if tenant is not None:
            return len(self._accounts.get(tenant, ()))
        copied = {block.block_id for blocks in self._copies.values() for block in blocks}
        return len(self._guaranteed.keys() | copied)

    def block_of(self, page: PageRef) -> Any:
        """The pool's block behind a reference; the null block for None."""
        return self._pool.blocks[page.block] if isinstance(page, BlockRef) else self._pool.null_block


def _by_position(held: Sequence[Sequence[BlockRef | None]], groups: Sequence[KVGroup]) -> Iterator[BlockRef]:
    """Blocks in the order of the tokens they hold, over all groups."""
    ordered = sorted(
        (index * group.block_tokens, number, ref)
        for number, (refs, group) in enumerate(zip(held, groups, strict=True))
        for index, ref in enumerate(refs)
        if ref is not None
    )
    return (ref for _, _, ref in ordered)
