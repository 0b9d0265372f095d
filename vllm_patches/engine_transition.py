"""Seam: vllm.v1.engine.core:EngineCore.retire_event
Process: engine    Kind: addition
Why: the engine sees in the table that an epoch lost authority, but not under which contract.
Delta: a utility through which the API process tells the engine what happened to a scope.
No seam: utilities are methods of the engine core, looked up by name.
Remove: when plugins can register engine utilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(_original: None) -> Callable[..., Any]:
    """Hand the event to the scheduler's coordinator."""

    def retire_event(self: Any, event: Any) -> Any:
        try:
            return self.scheduler.retire.told(event)
        except Exception as error:
            self.scheduler.retire.defect = error  # vLLM turns it into a message; the next pass must not go on
            raise

    return retire_event


SEAM = Seam("vllm.v1.engine.core:EngineCore.retire_event", "addition", build)
