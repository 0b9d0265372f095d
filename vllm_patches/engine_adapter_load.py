"""Seam: vllm.v1.engine.core:EngineCore.add_lora
Process: engine    Kind: wrap
Why: an adapter loaded in place changes what its name means; KV written under it would be adopted (invariant 4).
Delta: before an adapter is loaded in place, certificates are revoked and their pins dropped.
No seam: neither the scheduler nor a connector hears of adapters.
Remove: when the engine core announces adapter changes to its scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Revoke first."""

    def add_lora(self: Any, lora_request: Any) -> Any:
        if lora_request.load_inplace:
            self.scheduler.retire.revoke_certificates()
        return original(self, lora_request)

    return add_lora


SEAM = Seam("vllm.v1.engine.core:EngineCore.add_lora", "wrap", build)
