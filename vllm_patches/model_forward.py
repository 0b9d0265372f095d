"""Seam: vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward
Process: worker    Kind: wrap
Why: a launched model step always runs to its end, whoever still wants its rows.
Delta: in an armed eager step rows that lost their use are cut out between two decoder layers; what comes out has
    zeros in their places, so that the runner's state stays whole.  A step that stops as a whole gives zeros.  While a
    pass runs its layers find no KV connector.
No seam: the method exists to be overridden by a subclass, but the worker names the runner's class itself.
Remove: when the worker takes the runner's class from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard where the forward call begins and ends; a draft model's forward has a seam of its own."""
    from retire.engine.forward import guarded
    from retire.engine.tier import unknown_to_layers

    def _model_forward(
        self: Any,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        def run() -> Any:
            return original(
                self,
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=inputs_embeds,
                **model_kwargs,
            )

        embedded = inputs_embeds is not None
        rows = (inputs_embeds if embedded else input_ids).shape[0]
        with unknown_to_layers():
            return guarded(self, rows, run, embedded=embedded)

    return _model_forward


SEAM = Seam(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
    "wrap",
    build,
    relies_on=(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings",
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        "vllm.distributed.kv_transfer.kv_transfer_state:has_kv_transfer_group",
        "vllm.model_executor.layers.attention.kv_transfer_utils:maybe_transfer_kv_layer",
    ),
)
