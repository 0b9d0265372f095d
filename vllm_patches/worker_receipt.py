"""Seam: vllm.v1.worker.gpu_worker:Worker.sample_tokens
Process: worker    Kind: wrap
Why: a model step's output says nothing about whether its rows were computed in every layer.
Delta: the receipt of the step rides on its output.
No seam: ModelRunnerOutput has no field for other packages.
Remove: when ModelRunnerOutput carries plugin data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attach the receipt to the output, or to what an asynchronous output will deliver."""
    from retire.engine.worker import guard

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        receipt = guard().end()
        if receipt is not None:
            getattr(output, "_model_runner_output", output).retire_receipt = receipt
        return output

    return sample_tokens


SEAM = Seam("vllm.v1.worker.gpu_worker:Worker.sample_tokens", "wrap", build)
