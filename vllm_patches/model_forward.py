"""Seam: vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward
Process: worker    Kind: wrap
Why: a launched model step always runs to its end, whoever still wants its rows.
Delta: a step that a safe point stops returns zeros of the right shape, so that the runner's state stays whole.
No seam: the method exists to be overridden by a subclass, but the worker names the runner's class itself.
Remove: when the worker takes the runner's class from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Catch the fence where the forward call ends; later forwards of the step (a draft model's) are not guarded."""
    from retire.engine.worker import StepFenced, guard

    def _model_forward(
        self: Any,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        step = guard()
        if not self.use_aux_hidden_state_outputs:  # then the output has another shape; let the step finish
            step.arm()
        try:
            if step.armed:
                step.safe_point()
            return original(
                self,
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=inputs_embeds,
                **model_kwargs,
            )
        except StepFenced:
            import torch

            rows = (inputs_embeds if input_ids is None else input_ids).shape[0]
            return torch.zeros(rows, self.model_config.get_hidden_size(), dtype=self.dtype, device=self.device)
        finally:
            step.disarm()

    return _model_forward


SEAM = Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward", "wrap", build)
