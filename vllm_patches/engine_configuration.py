"""Seam: vllm.engine.arg_utils:EngineArgs.create_engine_config
Process: api    Kind: wrap
Why: a configuration or a tenants file in which a guarantee cannot hold must stop start-up before a model is loaded.
Delta: the tenants file and the finished configuration are checked, and this process takes its state directory.
No seam: general plugins run before the configuration exists, endpoint plugins after the engine does.
Remove: when plugins can veto a configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check what upstream has made of the arguments."""
    from retire.authority import home
    from retire.engine import configuration
    from retire.settings import Settings
    from retire.tenants import Registry

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        tenants = Registry.from_env()
        config = original(self, *args, **kwargs)
        configuration.check(config, api_processes=self._api_process_count)
        configuration.check_tenants(config, tenants)
        home.own(Settings.from_env(), tenants)
        return config

    return create_engine_config


SEAM = Seam("vllm.engine.arg_utils:EngineArgs.create_engine_config", "wrap", build)
