"""Who owns a KV block: generations and pins over vLLM's block pool.

Owns: the count of allocations per block, and the references that keep certified blocks alive until adoption.
Must not know: scopes, epochs, requests' fates.  Strategy: a pin is one reference count of the pool, taken once and
given back once, keyed by the request that wrote the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from retire.core.errors import InvariantViolation
from retire.core.types import BlockId, BlockRef, Generation, Holding, RequestId, TenantId


class Ownership:
    """`pool`: vLLM's BlockPool (or anything with `blocks`, `null_block`, `touch` and `free_blocks`)."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._generation = [0] * len(pool.blocks)
        self._pins: dict[RequestId, list[Any]] = {}
        self._tenants: dict[RequestId, TenantId] = {}  # of the pins

    def allocated(self, blocks: Iterable[Any]) -> None:
        """The pool handed these blocks to a new owner."""
        for block in blocks:
            self._generation[block.block_id] += 1

    def generation(self, block: BlockId) -> Generation:
        """How often the block has been handed out."""
        return Generation(self._generation[block])

    def refs(self, blocks: Iterable[Any], full_blocks: int) -> tuple[BlockRef | None, ...]:
        """References to the first `full_blocks` blocks, None for those a window has let go."""
        return tuple(
            None if block.is_null else BlockRef(BlockId(block.block_id), self.generation(BlockId(block.block_id)))
            for _, block in zip(range(full_blocks), blocks, strict=False)
        )

    def pin(self, holding: Holding) -> None:
        """Keep every block of the holding alive."""
        if holding.request in self._pins:
            raise InvariantViolation(f"invariant 6: {holding.request} is pinned twice")
        blocks = [self._pool.blocks[ref.block] for group in holding.groups for ref in group if ref is not None]
        self._pool.touch(blocks)
        self._pins[holding.request] = blocks
        self._tenants[holding.request] = holding.tenant

    def keep_only(self, request: RequestId, groups: tuple[tuple[BlockRef | None, ...], ...]) -> None:
        """Give back what the holding of `request` has beyond these blocks: nobody will adopt it."""
        kept = {ref.block for group in groups for ref in group if ref is not None}
        blocks = self._pins[request]
        self._pins[request] = [block for block in blocks if block.block_id in kept]
        self._pool.free_blocks(block for block in reversed(blocks) if block.block_id not in kept)

    def release(self, holding: Holding) -> None:
        """Give the references back, the sequence's tail first so that it is evicted first."""
        blocks = self._pins.pop(holding.request, None)
        if blocks is None:
            raise InvariantViolation(f"invariant 6: {holding.request} is not pinned")
        del self._tenants[holding.request]
        self._pool.free_blocks(reversed(blocks))

    def pinned_blocks(self, tenant: TenantId | None = None) -> int:
        """Distinct blocks that some pin, or some pin of the tenant, keeps alive."""
        pins = [blocks for rid, blocks in self._pins.items() if tenant in (None, self._tenants[rid])]
        return len({block.block_id for blocks in pins for block in blocks})

    def block_of(self, ref: BlockRef | None) -> Any:
        """The pool's block behind a reference; the null block for None."""
        return self._pool.null_block if ref is None else self._pool.blocks[ref.block]
