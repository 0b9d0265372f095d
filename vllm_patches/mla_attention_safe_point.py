"""Seam: vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl
Process: worker    Kind: wrap
Why: latent attention (MLA) has operations of its own, whose module has imported `get_attention_context` by name, so
    that they never meet the safe points there; and its back ends describe a step in a way of their own, so that no
    rows are cut out between its layers.  Without this nothing would stop a step of such a model.
Delta: in an armed step the start of every such layer's attention, behind its write of KV, is a safe point, in eager
    and in compiled mode.  Taken out between armed passes: the operation looks the method up at every call.
No seam: see attention_safe_point.
Remove: together with attention_safe_point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask before the layer attends."""
    from retire.engine.worker import guard

    def forward_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = guard()
        if step.armed:
            step.attention_point(self.layer_name)
        return original(self, *args, **kwargs)

    return forward_impl


M = "vllm.model_executor.layers.attention.mla_attention:"
SEAM = Seam(
    M + "MLAAttention.forward_impl",
    "wrap",
    build,
    relies_on=(M + "MLAAttention.forward", M + "unified_mla_attention_with_output"),
)
