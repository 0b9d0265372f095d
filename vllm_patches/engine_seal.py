"""Seam: vllm.v1.engine.core:EngineCore.retire_seal
Process: engine    Kind: addition
Why: the API process must know that engine and workers run the same patches before it serves.
Delta: a utility that the API process calls; it collects the seals of engine and workers.
No seam: utilities are methods of the engine core, looked up by name.
Remove: when plugins can register engine utilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(_original: None) -> Callable[..., Any]:
    """Seals of this process and of every worker."""
    from retire import seal

    def retire_seal(self: Any) -> list[dict[str, str] | None]:
        return [seal.require().as_dict(), *self.model_executor.collective_rpc(seal.of_worker)]

    return retire_seal


SEAM = Seam(
    "vllm.v1.engine.core:EngineCore.retire_seal",
    "addition",
    build,
    relies_on=("vllm.v1.engine.core:EngineCoreProc._handle_client_request",),
)
