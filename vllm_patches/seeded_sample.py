"""Seam: vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample
Process: worker    Kind: wrap
Why: a prefill chunk that is not the prompt's last samples a token that is thrown away; upstream winds a seeded
    generator back by its CUDA offset, which a CPU generator does not have, and the engine dies.
Delta: on the CPU the generators of such rows get back the state they had before sampling.
No seam: the discarded rows are known only inside the runner.
Remove: when `"seed": 1` with a prompt longer than the prefill quantum survives on an unpatched CPU server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def discarded_cpu_generators(runner: Any) -> dict[int, Any]:
    """Row → generator of the seeded rows whose sample will be thrown away, on the CPU."""
    mask = runner.discard_request_mask.np
    rows = runner.input_batch.num_reqs
    return {
        row: generator
        for row, generator in runner.input_batch.generators.items()
        if row < rows and mask[row] and generator.device.type == "cpu"
    }


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sample, then undo what sampling did to generators whose token does not count."""

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in discarded_cpu_generators(self).values()]
        output = original(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    return _sample


SEAM = Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", "wrap", build)
