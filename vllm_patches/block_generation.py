"""Seam: vllm.v1.core.block_pool:BlockPool.get_new_blocks
Process: engine    Kind: wrap
Why: a block id alone does not say whose content the block holds; ids are handed out again and again.
Delta: every allocation bumps the block's generation, which certificates carry (invariant 4).
No seam: blocks have no ownership counter and the pool no allocation hook for all blocks.
Remove: when KVCacheBlock counts its allocations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Allocate, then bump."""

    def get_new_blocks(self: Any, num_blocks: int) -> Any:
        blocks = original(self, num_blocks)
        ownership = getattr(self, "retire_ownership", None)
        if ownership is not None:
            ownership.allocated(blocks)
        return blocks

    return get_new_blocks


SEAM = Seam("vllm.v1.core.block_pool:BlockPool.get_new_blocks", "wrap", build)
