"""Seam: vllm.model_executor.layers.linear:ColumnParallelLinear.forward
Process: worker    Kind: wrap
Why: attention safe points stand next to each other, once a layer; a long step's layer takes longer than a fence may.
Delta: in an armed eager step whose layers are long, the start of every such linear layer (query-key-value, gate and
    up) is a safe point.  Taken out where none is asked.
No seam: forward hooks on modules would cost every step, armed or not, and compiled graphs refuse them.
Remove: together with attention_safe_point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask before the layer starts; a traced graph must not see the question."""
    from torch.compiler import is_compiling

    from retire.engine.worker import guard

    def forward(self: Any, input_: Any) -> Any:
        if not is_compiling():
            step = guard()
            if step.fine:
                step.safe_point()
        return original(self, input_)

    return forward


SEAM = Seam("vllm.model_executor.layers.linear:ColumnParallelLinear.forward", "wrap", build)
