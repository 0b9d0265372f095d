"""Seam: vllm.model_executor.layers.linear:RowParallelLinear.forward
Process: worker    Kind: wrap
Why: see column_linear_safe_point; these are the layers behind attention and behind the activation.
Delta: in an armed eager step whose layers are long, the start of every such linear layer (output, down) is a safe
    point.  Taken out where none is asked.
No seam: see column_linear_safe_point.
Remove: together with attention_safe_point.
"""

from __future__ import annotations

from vllm_patches._seam import Seam
from vllm_patches.column_linear_safe_point import build

SEAM = Seam("vllm.model_executor.layers.linear:RowParallelLinear.forward", "wrap", build)
