"""How vLLM's scheduler is told to compute less of prompts in a step.

Owns: what upstream reads at every `schedule()` (its budget, its threshold for long prompts, who is due), for the length
of one call.  Must not know: why a quantum was chosen (`retire.core.quantum`).
Strategy: only prompts are cut.  Decodes, guesses included, come on top of the quantum.  Prompts are served in
upstream's order, each up to the quantum; once they have it, later ones wait for the next step, so that nobody takes
the room of a decode that stands behind him.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cut_to(quantum: int, scheduler: Any) -> Iterator[None]:
    """Until the end of the block, `scheduler` gives `quantum` tokens of prompts to a step.

    Where one running prompt ends below the quantum and the next begins there, it is up to twice as many.
    """
    largest, config = scheduler.max_num_scheduled_tokens, scheduler.scheduler_config
    threshold, adaptive = config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold
    most = threshold
    if adaptive:  # as upstream has it, before the budget is cut
        most = max(threshold, config.max_num_batched_tokens // max(1, sum(scheduler.get_request_counts())))
    chunk = min(quantum, most) if threshold > 0 else quantum
    held: list[tuple[Any, int]] = []
    decodes = prompts = 0
    for request in scheduler.running:
        if request.next_decode_eligible_step > scheduler.current_step + 1:
            continue
        wanted = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        if wanted <= 1 + scheduler.num_spec_tokens:
            decodes += wanted
        elif prompts < quantum:
            prompts += min(wanted, chunk)
        else:
            held.append((request, request.next_decode_eligible_step))
            request.next_decode_eligible_step = sys.maxsize
    scheduler.max_num_scheduled_tokens = min(largest, decodes + max(prompts, quantum))
    config.long_prefill_token_threshold = chunk
    scheduler.adaptive_long_prefill_threshold = False  # else upstream widens the chunk again
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = largest
        config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = threshold, adaptive
        for request, step in held:
            request.next_decode_eligible_step = step
