"""Seam: vllm.v1.engine.output_processor:OutputProcessor.process_outputs
Process: api    Kind: wrap
Why: tokens that left the engine before their epoch was revoked would still be detokenized and queued for delivery.
Delta: outputs whose ticket is no longer current do not enter the queue.
No seam: the method is the only one that sees every output.
Remove: when output processing can be filtered by a plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compare, then process what is left."""
    from retire.authority import home

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        states = self.request_states

        def current(output: Any) -> bool:
            ticket = getattr(states.get(output.request_id), "retire_ticket", None)
            return ticket is None or home.table().current(ticket)

        return original(self, [output for output in engine_core_outputs if current(output)], *args, **kwargs)

    return process_outputs


SEAM = Seam(
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    "wrap",
    build,
    relies_on=("vllm.v1.engine.output_processor:OutputProcessor.abort_requests",),
)
