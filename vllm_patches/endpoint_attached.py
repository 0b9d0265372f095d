"""Seam: vllm.plugins:load_endpoint_plugins
Process: api    Kind: wrap
Why: an endpoint plugin that fails to load is logged and left out; the server would then run without its gate.
Delta: start-up stops unless RETIRE's endpoint plugin is among those loaded.
No seam: endpoint plugins are optional by design upstream.
Remove: when a plugin can be declared mandatory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load, then look for ours."""
    from retire.core.errors import SeamError
    from retire.settings import PLUGIN_NAME

    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> Any:
        plugins = original(*args, **kwargs)
        if not any(plugin.name == PLUGIN_NAME for plugin in plugins):
            raise SeamError("RETIRE's HTTP gate did not load; the server would run ungated")
        return plugins

    return load_endpoint_plugins


SEAM = Seam(
    "vllm.plugins:load_endpoint_plugins",
    "wrap",
    build,
    relies_on=("vllm.plugins.endpoint_plugins.interface:attach_endpoint_plugins",),
)
