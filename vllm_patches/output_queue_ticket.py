"""Seam: vllm.v1.engine.output_processor:OutputProcessor.add_request
Process: api    Kind: wrap
Why: an output of the engine names its request, not the authority under which the request was admitted.
Delta: the request's state in the API process remembers its ticket, for output_queue_gate.
No seam: RequestState keeps nothing of extra_args.
Remove: when RequestState carries the request's extra_args.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the request, then note whose it is."""
    from retire.authority import home
    from retire.authority.tag import from_xargs

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        extra_args = getattr(request.sampling_params, "extra_args", None)
        tag = from_xargs(extra_args, home.table().secret) if extra_args else None
        if tag is not None:
            self.request_states[request.request_id].retire_ticket = tag.ticket
        return result

    return add_request


SEAM = Seam("vllm.v1.engine.output_processor:OutputProcessor.add_request", "wrap", build)
