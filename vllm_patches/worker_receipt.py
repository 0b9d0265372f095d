"""Seam: vllm.v1.worker.gpu_worker:Worker.sample_tokens
Process: worker    Kind: wrap
Why: a model step's output says nothing about whether its rows were computed in every layer.
Delta: the receipt of the step rides on its output; where that is still on its way from the device, it is put there when
    the output has arrived, because the device has then computed whatever was launched before.
No seam: ModelRunnerOutput has no field for other packages.
Remove: when ModelRunnerOutput carries plugin data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attach the receipt to the output, or to what an asynchronous output will deliver."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    from retire.engine.worker import guard

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        receipt = guard().end()
        if receipt is None or output is None:  # None: the step has failed, and its own call says how
            return output
        if not isinstance(output, AsyncModelRunnerOutput):
            output.retire_receipt = receipt
            return output
        arrive = output.get_output

        def get_output() -> Any:
            arrived = arrive()
            arrived.retire_receipt = receipt.arrived(time.monotonic_ns())
            return arrived

        output.get_output = get_output
        return output

    return sample_tokens


V1, V2 = "vllm.v1.worker.gpu_model_runner:", "vllm.v1.worker.gpu."
SEAM = Seam(
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
    "wrap",
    build,
    # Outputs are copied to the host behind the pass, on its stream or on one that waits for it.
    relies_on=(
        V1 + "AsyncGPUModelRunnerOutput.__init__",
        V1 + "AsyncGPUModelRunnerOutput.get_output",
        V1 + "GPUModelRunner._bookkeeping_sync",
        V1 + "GPUModelRunner._to_list",
        V2 + "async_utils:AsyncOutput.__init__",
        V2 + "async_utils:AsyncOutput.get_output",
        V2 + "async_utils:stream",
        V2 + "model_runner:GPUModelRunner.sample_tokens",
        "vllm.v1.executor.uniproc_executor:AsyncOutputFuture.result",
        "vllm.v1.executor.multiproc_executor:WorkerProc.enqueue_output",
    ),
)
