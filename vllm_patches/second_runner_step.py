"""Seam: vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model
Process: worker    Kind: wrap
Why: a launched model step always runs to its end, whoever still wants its rows; model runner V2 calls its model
    itself, in the middle of this method.
Delta: in an armed step the model's own forward is guarded; a step that stops as a whole gives zeros.
No seam: the runner has no method around the call, and the worker names the runner's class itself.
Remove: when the worker takes the runner's class from the configuration, and the class has a method for the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the model for as long as the step is launched."""
    from retire.engine.second_runner import model_guarded

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with model_guarded(self):
            return original(self, scheduler_output, *args, **kwargs)

    return execute_model


G = "vllm.v1.worker.gpu."
SEAM = Seam(
    G + "model_runner:GPUModelRunner.execute_model",
    "wrap",
    build,
    relies_on=(
        G + "cudagraph_utils:CudaGraphManager.run_pw_graph",
        G + "kv_connector:ActiveKVConnector.pre_forward",  # takes the tier's orders before the pass
        G + "kv_connector:ActiveKVConnector.post_forward",
        G + "kv_connector:ActiveKVConnector.no_forward",
    ),
)
