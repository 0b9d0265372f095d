"""Model Runner V2: the forward pass of a step, guarded on the model itself.

Owns: the model's `forward` for the length of one step.  Must not know: why a step stops.
Strategy: the runner has no method around its forward call, so the call is met where it arrives.  A pass that is
replayed from a graph of the whole step never arrives there; it is short and runs to its end.  The runner keeps the
order of its batch to itself, so no rows are cut out: a step stops as a whole or finishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from retire.engine.forward import decoder_loop
from retire.engine.worker import StepFenced, guard


@contextmanager
def model_guarded(runner: Any) -> Iterator[None]:
    """While this is open, an armed step's forward call is guarded; what it gives has all its rows, whatever happens.

    Passes that are given embeddings, or that give hidden states of single layers as well, are not stopped; see
    `retire.engine.forward`.
    """
    step, model = guard(), runner.model
    if not step.wanted or runner.use_aux_hidden_state_outputs:
        yield
        return
    loop = decoder_loop(model)
    loop.give_up("model runner V2 keeps the order of its batch to itself")
    forward = model.forward

    def stoppable(**inputs: Any) -> Any:
        if inputs.get("inputs_embeds") is not None:
            return forward(**inputs)
        try:
            step.arm(max(1, len(loop.layers)))
            return forward(**inputs)
        except StepFenced:
            rows, hidden = inputs["input_ids"].shape[0], runner.model_config.get_hidden_size()
            return torch.zeros(rows, hidden, dtype=runner.dtype, device=runner.device)
        finally:
            step.disarm()

    model.forward = stoppable
    try:
        yield
    finally:
        del model.forward
