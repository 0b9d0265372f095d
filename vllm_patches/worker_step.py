"""Seam: vllm.v1.worker.gpu_worker:Worker.execute_model
Process: worker    Kind: wrap
Why: the worker has no notion of which request a row belongs to once a step runs, so nothing can stop it.
Delta: the step's plan is handed to the guard before the step starts.
No seam: worker_extension_cls may only add methods, not run before one.
Remove: when vLLM calls a hook with the scheduler output before each model step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Begin the guarded step, then run it."""
    from retire.engine.forward import draft_model
    from retire.engine.worker import guard

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        drafts = draft_model(self.model_runner) is not None
        guard().begin(getattr(scheduler_output, "retire_plan", None), drafts=drafts)
        return original(self, scheduler_output)

    return execute_model


SEAM = Seam("vllm.v1.worker.gpu_worker:Worker.execute_model", "wrap", build)
