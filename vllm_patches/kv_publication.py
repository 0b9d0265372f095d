"""Seam: vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots
Process: engine    Kind: wrap
Why: block hashes are registered when a step is scheduled, which is safe only because a launched step always
    finishes; a stopped step would leave readable blocks that were never written (invariant 3).
Delta: blocks of scoped requests are registered at the step's receipt.
No seam: `delay_cache_blocks` is an argument that the scheduler's own loop sets.
Remove: when publication at step completion is an option upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Delay publication for scoped requests."""

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        coordinator = getattr(self, "retire", None)
        if coordinator is None:  # a manager that no versioned scheduler owns
            return original(self, request, num_new_tokens, *args, **kwargs)
        scoped = coordinator.is_scoped(request.request_id)
        if scoped:
            kwargs["delay_cache_blocks"] = True
        blocks = original(self, request, num_new_tokens, *args, **kwargs)
        if scoped and blocks is not None:
            coordinator.rows_allocated(request, kwargs.get("num_new_computed_tokens", 0), num_new_tokens)
        return blocks

    return allocate_slots


M = "vllm.v1.core.kv_cache_manager:KVCacheManager."
SEAM = Seam(
    M + "allocate_slots",
    "wrap",
    build,
    relies_on=(
        M + "cache_blocks",
        M + "free",
        M + "get_blocks",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.add_local_computed_blocks",
        "vllm.v1.core.block_pool:BlockPool.touch",
        "vllm.v1.core.block_pool:BlockPool.free_blocks",
    ),
)
