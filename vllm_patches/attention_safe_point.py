"""Seam: vllm.model_executor.layers.attention.attention:get_attention_context
Process: worker    Kind: wrap
Why: between two layers nothing in vLLM asks whether the step is still wanted.
Delta: in an armed step every look-up of an attention layer's context is a safe point (twice a layer where the
    back end writes KV separately), in eager and in compiled mode.  A step whose rows cannot be cut out is decided
    upon here.  Taken out between armed passes: vLLM's attention operations look the function up at every call.  A
    module that has imported its name keeps what it found.
No seam: none exists inside a forward pass.
Remove: when vLLM has a per-layer hook that works in compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask before the layer starts."""
    from retire.engine.worker import guard

    def get_attention_context(layer_name: str) -> Any:
        step = guard()
        if step.armed:
            step.attention_point(layer_name)
        return original(layer_name)

    return get_attention_context


SEAM = Seam(
    "vllm.model_executor.layers.attention.attention:get_attention_context",
    "wrap",
    build,
    relies_on=(
        "vllm.model_executor.layers.attention.attention:unified_kv_cache_update",
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
    ),
)
