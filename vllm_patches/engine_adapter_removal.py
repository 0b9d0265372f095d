"""Seam: vllm.v1.engine.core:EngineCore.remove_lora
Process: engine    Kind: wrap
Why: the next adapter of that name may be another; KV written under the removed one would be adopted (invariant 4).
Delta: before an adapter is removed, certificates are revoked and their pins dropped.
No seam: neither the scheduler nor a connector hears of adapters.
Remove: when the engine core announces adapter changes to its scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Revoke first."""

    def remove_lora(self: Any, lora_id: int) -> Any:
        self.scheduler.retire.revoke_certificates()
        return original(self, lora_id)

    return remove_lora


SEAM = Seam("vllm.v1.engine.core:EngineCore.remove_lora", "wrap", build)
