"""Seam: vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids
Process: worker    Kind: wrap
Why: a draft model computes all rows of a step once more, and its layers hold KV in the same blocks; nothing stops it
    when nobody wants the rows any longer.
Delta: a step that has stopped drafts nothing; in one that has not, the draft model's pass over the step's rows is
    guarded like the target's, under the same plan and receipt, and its layers find no KV connector either.
No seam: the drafter calls its model itself, and its class is named in the runner.
Remove: when the runner takes the drafter's class from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the drafter's passes."""
    from retire.engine.forward import drafted
    from retire.engine.tier import unknown_to_layers

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unknown_to_layers():
            return drafted(self, lambda: original(self, *args, **kwargs))

    return propose_draft_token_ids


P = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer."
SEAM = Seam(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    "wrap",
    build,
    relies_on=(
        P + "propose",
        P + "set_inputs_first_pass",
        P + "build_per_group_and_layer_attn_metadata",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",  # guesses go with their request
    ),
)
