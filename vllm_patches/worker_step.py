"""Seam: vllm.v1.worker.gpu_worker:Worker.execute_model
Process: worker    Kind: wrap
Why: the worker has no notion of which request a row belongs to once a step runs, so nothing can stop it.
Delta: the step's plan is handed to the guard before the step starts; model runner V2, which calls its model in the
    middle of a step, finds the model's own forward guarded meanwhile, and its layers find no KV connector.
No seam: worker_extension_cls may only add methods, not run before one.
Remove: when vLLM calls a hook with the scheduler output before each model step, and both runners have a method for
    the forward that a subclass can take over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Begin the guarded step, then run it."""
    from retire.engine.forward import draft_model
    from retire.engine.second_runner import model_guarded
    from retire.engine.tier import unknown_to_layers
    from retire.engine.worker import guard

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        drafts = draft_model(self.model_runner) is not None
        guard().begin(getattr(scheduler_output, "retire_plan", None), drafts=drafts)
        if not self.use_v2_model_runner:
            return original(self, scheduler_output)
        with unknown_to_layers(), model_guarded(self.model_runner):
            return original(self, scheduler_output)

    return execute_model


V2 = "vllm.v1.worker.gpu."
SEAM = Seam(
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    "wrap",
    build,
    relies_on=(
        V2 + "model_runner:GPUModelRunner.execute_model",
        V2 + "cudagraph_utils:CudaGraphManager.run_pw_graph",
        V2 + "kv_connector:ActiveKVConnector.pre_forward",  # takes the tier's orders before the pass
        V2 + "kv_connector:ActiveKVConnector.post_forward",
        V2 + "kv_connector:ActiveKVConnector.no_forward",
    ),
)
