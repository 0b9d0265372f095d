"""Seam: vllm.v1.engine.input_processor:InputProcessor.process_inputs
Process: api    Kind: wrap
Why: a scope named on a route (or a front end) that no gate covers would pass without authority, and tenants would hit
    each other's blocks in the prefix cache.
Delta: a request that names a scope without a ticket of this server is refused before it reaches the engine; where
    tenants are isolated, a request's cache salt is its tenant's.
No seam: every front end builds its own sampling parameters and only this method sees them all.
Remove: when vLLM validates extra_args through a plugin, and knows tenants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Look at the parameters first, and at the salt last."""
    from retire.authority import home
    from retire.authority.tag import from_xargs
    from retire.core.errors import CallerError
    from retire.tenants import Registry

    tenants = Registry.from_env()

    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        extra_args = getattr(params, "extra_args", None)
        if extra_args:
            from vllm.exceptions import VLLMUnprocessableEntityError

            try:
                from_xargs(extra_args, home.table().secret)
            except CallerError as error:
                raise VLLMUnprocessableEntityError(str(error), parameter=error.param) from error
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if tenants.isolated:
            request.cache_salt = tenants.cache_salt(home.asking.get(), home.table().secret, request.cache_salt)
        return request

    return process_inputs


SEAM = Seam("vllm.v1.engine.input_processor:InputProcessor.process_inputs", "wrap", build)
