"""Seam: vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync
Process: worker    Kind: wrap
Why: see seeded_sample: the wind-back itself stands here and raises on a CPU generator.
Delta: generators that seeded_sample has already restored are out of its sight.
No seam: the discarded rows are known only inside the runner.
Remove: together with seeded_sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam
from vllm_patches.seeded_sample import discarded_cpu_generators


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the restored generators while upstream looks for some to wind back."""

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        restored = discarded_cpu_generators(self)
        generators = self.input_batch.generators
        for row in restored:
            del generators[row]
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(restored)

    return _bookkeeping_sync


SEAM = Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync", "wrap", build)
