"""Seam: vllm.v1.engine.core:EngineCore.collective_rpc
Process: engine    Kind: wrap
Why: weights are changed by remote calls to the workers; KV that the old ones wrote would be adopted under the new
    (invariant 4).
Delta: before a call that may change weights, certificates are revoked and their pins dropped.
No seam: neither the scheduler nor a connector hears of weight updates.
Remove: when the engine core announces weight changes to its scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam

LOOKS_ONLY = frozenset(
    {
        "compute_weight_checksums",
        "get_weight_version",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
    }
)


def may_change_weights(method: object) -> bool:
    """Whether a worker's method of this name (or an unnamed function) can make written KV stale."""
    return not isinstance(method, str) or ("weight" in method and method not in LOOKS_ONLY)


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Revoke first."""

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if may_change_weights(method):
            self.scheduler.retire.revoke_certificates()
        return original(self, method, *args, **kwargs)

    return collective_rpc


SEAM = Seam(
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    "wrap",
    build,
    relies_on=("vllm.v1.engine.core:EngineCore.sleep", "vllm.v1.engine.core:EngineCore._reset_caches"),
)
