"""Seam: vllm.v1.engine.core:EngineCore.retire_facts
Process: engine    Kind: addition
Why: the API process must learn of receipts, certificates and releases when they happen, not when it asks.
Delta: a utility whose answer is held back until there is something to tell.
No seam: utilities are methods of the engine core, looked up by name; one that returns a future is upstream's own way.
Remove: when plugins can register engine utilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(_original: None) -> Callable[..., Any]:
    """A future of the facts that follow the cursor."""

    def retire_facts(self: Any, cursor: int) -> Any:
        return self.scheduler.retire.facts.after(cursor)

    return retire_facts


SEAM = Seam(
    "vllm.v1.engine.core:EngineCore.retire_facts",
    "addition",
    build,
    relies_on=("vllm.v1.engine.core:EngineCoreProc._invoke_utility_method",),
)
