"""Seam: vllm.v1.engine.input_processor:InputProcessor.process_inputs
Process: api    Kind: wrap
Why: a scope named on a route (or a front end) that no gate covers would pass without authority, and the prefix cache
     serves whoever has the same tokens, whosever they were.
Delta: a request that names a scope without a ticket of this server is refused before it reaches the engine; with
     isolated tenants every request's cache salt is its tenant's, and one without a tenant shares with nobody.  The
     response that a scoped prompt belongs to is told its tokens.
No seam: every front end builds its own sampling parameters and prompts, and only this method sees them all.
Remove: when vLLM validates extra_args and derives cache salts through a plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Look at the parameters first; say whose cache it is last."""
    from retire.authority import home
    from retire.authority.tag import from_xargs
    from retire.core.errors import CallerError
    from retire.server.prompts import told_prompt
    from retire.tenants import asking, cache_salt

    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        extra_args, tag = getattr(params, "extra_args", None), None
        if extra_args:
            from vllm.exceptions import VLLMUnprocessableEntityError

            try:
                tag = from_xargs(extra_args, home.table().secret)
            except CallerError as error:
                raise VLLMUnprocessableEntityError(str(error), parameter=error.param) from error
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if home.tenants().isolated:
            tenant = asking.get() if tag is None else tag.tenant
            request.cache_salt = cache_salt(tenant, home.table().secret, request.cache_salt)
        tell = told_prompt.get()
        if tell is not None and tag is not None and request.prompt_token_ids:
            tell(request.prompt_token_ids)
        return request

    return process_inputs


SEAM = Seam(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "wrap",
    build,
    relies_on=(
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    ),
)
